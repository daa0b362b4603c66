"""Which run a configuration is, and which runs repeat each other. Configurations are plain nested data here.

A run is known by its resolved configuration without what resume may change. A group is a run without its learning rate
and seed, and without what changes its numbers by rounding only: the runs of a group are tries of one experiment.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]
Difference = tuple[str, Any, Any]

INDIFFERENT = (
    *("parallel", "profile", "track", "on_checkpoint", "data.workers", "data.verify"),
    *("train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.keep_every"),
)
"""What a run may continue with otherwise than it began: it decides where and how the work is done, not its result."""

POOLED = (
    *("train.optim.lr", "train.seed", "preset"),
    *("train.device", "train.num_threads", "train.compile", "train.eval_every", "train.eval_size"),
)
"""What runs of one group may differ in."""

LONG = 60  # letters of what differs
_OUTSIDE = "outside."

ABSENT: tuple[Any, ...] = (None, "", {}, [], ())
"""A setting with such a value is as if it was not there: later versions have more settings than earlier ones."""


def flat(config: Config) -> dict[str, Any]:
    """With dotted keys: `train.optim.lr`. Without recursion, as a file of a stranger may nest without end."""
    found: dict[str, Any] = {}
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter(config.items()))]
    while stack:
        prefix, items = stack[-1]
        for key, value in items:
            if isinstance(value, Mapping) and value:
                stack.append((f"{prefix}{key}.", iter(value.items())))
                break
            found[f"{prefix}{key}"] = value
        else:
            stack.pop()
    return found


def settings(config: Config, without: Collection[str] = INDIFFERENT) -> dict[str, Any]:
    """What is set, with dotted keys, without some settings or groups of them. Text may lie anywhere."""
    return {
        key: True if _place_of_text(key) else value
        for key, value in flat(config).items()
        if value not in ABSENT and not _among(key, without)
    }


def identity(config: Config, outside: Mapping[str, str] | None = None) -> str:
    """12 hex digits. `outside`: the sha256 of every file from outside that the run uses, by reference; where a run
    folder was read, its configuration has them as `outside`."""
    return _hash(settings({**config, "outside": outside} if outside else config))


def group(config: Config) -> str:
    """The identity of what is repeated: by this key runs are pooled."""
    return _hash(settings(config, (*INDIFFERENT, *POOLED)))


def differences(a: Config, b: Config) -> list[Difference]:
    """(dotted key, value in a, value in b) wherever two configurations differ in what decides the result."""
    left, right = ({k: v for k, v in flat(c).items() if v != {} and not _among(k, INDIFFERENT)} for c in (a, b))
    keys = dict.fromkeys([*left, *right])
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def changes(began: Config, now: Config) -> list[Difference]:
    """The differences that a run cannot be continued with.

    A text may lie elsewhere: which one it is, its sha256 says (`canonlm.train.reading.check_unchanged`). And a constant
    learning rate may go on for longer: with the other schedules, steps that are done would have had other rates.
    """
    there, here = flat(began), flat(now)
    free = {key for key in there.keys() & here.keys() if _place_of_text(key)}
    if here.get("train.optim.schedule") == "constant" and here["train.steps"] > there["train.steps"]:
        free.add("train.steps")
    return [difference for difference in differences(began, now) if difference[0] not in free]


def what_differs(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several flat settings, how it differs from the others: `canon_residual=false, steps=200`. Settings
    that one of them lacks are not named there. What is long ends with a hash."""
    written = [{key: write(value) for key, value in one.items()} for one in groups]
    keys = [key for key in sorted(set().union(*written)) if len({one.get(key) for one in written}) > 1]
    leaves = Counter(map(leaf, keys))
    names = {key: leaf(key) if leaves[leaf(key)] == 1 else key for key in keys}
    return [_cut(", ".join(f"{names[key]}={one[key]}" for key in keys if key in one)) for one in written]


def leaf(key: str) -> str:
    """`train.optim.lr` → `lr`; `outside.mine.py:Block` → `mine.py:Block`"""
    return key.removeprefix(_OUTSIDE) if key.startswith(_OUTSIDE) else key.rpartition(".")[2]


def write(value: Any) -> str:
    """A setting as text, for whatever a file may hold."""
    return value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG - 8]}… {digest(text)[:6]}"


def _hash(found: Mapping[str, Any]) -> str:
    pairs = (f"{key}={json.dumps(found[key], default=str, skipkeys=True)}" for key in sorted(found))
    return digest("\n".join(pairs))[:12]


def _among(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _place_of_text(key: str) -> bool:
    return (key.startswith("text.sources.") and key.endswith(".path")) or key.startswith("text.validation.")

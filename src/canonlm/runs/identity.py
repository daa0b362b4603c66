"""Identities and names of runs, and groups of runs that repeat each other. Configurations are plain nested data here.

A run's identity is its resolved configuration without settings that a resume may change. A group also leaves out
learning rate and seed, and settings that change numbers by rounding only: its runs repeat one experiment.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from canonlm.core.errors import readable, shown

Config = Mapping[str, Any]
Difference = tuple[str, Any, Any]

NOT_IN_IDENTITY = (
    *("parallel", "profile", "track", "on_checkpoint", "data.workers", "data.verify"),
    *("train.deterministic", "train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.keep_every"),
)
"""Settings that may differ when a run is continued: they decide where and how the work is done, not its result."""

NOT_IN_GROUP = (
    *("train.optim.lr", "train.seed", "data.seed", "train.eval_seed", "preset"),
    *("train.device", "train.num_threads", "train.compile", "train.eval_every", "train.eval_size"),
)
"""More settings that may differ between the runs of a group."""

LATER = {"train.eval_split": "test"}
"""Settings that earlier versions did not have, with the value that was fixed then: it counts as not set."""

LONG = 60  # max letters of a description of differences
LONG_IN_NAME = 32  # max letters of settings in a name; longer ones become a hash
MAX_LETTERS = 100  # letters of one part of a name
MAX_NAME = 241  # letters of the name of a run: file systems take 255 bytes, and the queue's files add up to 14
SHAPE = {"num_hidden_layers": "L", "hidden_size": "d", "num_attention_heads": "h"}
_OUTSIDE = "outside."

ABSENT: tuple[Any, ...] = (None, "", {}, [], ())
"""A setting with such a value counts as not set: later versions have more settings than earlier ones."""


def flat(config: Config) -> dict[str, Any]:
    """The settings by dotted keys: `train.optim.lr`. Without recursion, as a file may be nested very
    deeply."""
    settings_by_key: dict[str, Any] = {}
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter(config.items()))]
    while stack:
        prefix, items = stack[-1]
        for key, value in items:
            if isinstance(value, Mapping) and value:
                stack.append((f"{prefix}{key}.", iter(value.items())))
                break
            settings_by_key[f"{prefix}{key}"] = value
        else:
            stack.pop()
    return settings_by_key


def settings(config: Config, without: Collection[str] = NOT_IN_IDENTITY) -> dict[str, Any]:
    """The settings that are set, by dotted keys, without those in `without`, or in groups of it. The paths of text and
    weights do not count."""
    return {
        key: True if _is_place(key) else value
        for key, value in flat(config).items()
        if value not in ABSENT and value != LATER.get(key) and not _among(key, without)
    }


def identity(config: Config, outside: Mapping[str, str] | None = None) -> str:
    """The identity of a run: 12 hex digits. `outside`: the sha256 of every file from outside that it uses, by
    reference; configurations read from run folders already have them as `outside`."""
    return _hash(settings({**config, "outside": outside} if outside else config))


def label(config: Config) -> dict[str, Any]:
    """The settings that files of a run note, as JSON holds them: all with which it cannot be continued otherwise."""
    noted = settings(config, (*NOT_IN_IDENTITY, "train.steps"))
    return dict(json.loads(json.dumps(noted, default=str, skipkeys=True)))


def check_label(noted: Any, own: Mapping[str, Any], place: str) -> None:
    """ValueError if the file at `place` notes another run. Settings that only one version has do not count."""
    for key, value in own.items():
        if isinstance(noted, Mapping) and key in noted and noted[key] != value:
            there, here = (shown(each) for each in (noted[key], value))
            raise ValueError(f"{place}: of another run than config.yaml: {key} is {there} there, and {here} here")


def group(config: Config) -> str:
    """The key of a run's group: runs with the same key are pooled."""
    return _hash(settings(config, (*NOT_IN_IDENTITY, *NOT_IN_GROUP)))


def differences(a: Config, b: Config) -> list[Difference]:
    """(dotted key, value in a, value in b) of all settings that affect results and differ."""
    left, right = ({k: v for k, v in flat(c).items() if v != {} and not _among(k, NOT_IN_IDENTITY)} for c in (a, b))
    keys = dict.fromkeys([*left, *right])
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def changes(began: Config, now: Config, done: int | None = None) -> list[Difference]:
    """The differences with which a run cannot be continued after `done` steps (None: after all of them).

    Texts and weights may have another path: their sha256 identifies them (`canonlm.train.data.check_unchanged`).
    `train.steps` may change while the steps done have the same learning rates with both numbers. (If the schedule
    changes, that is the difference.)
    """
    old, new = flat(began), flat(now)
    free = {key for key in old.keys() & new.keys() if _is_place(key)}
    same = old.get("train.optim.schedule") == new.get("train.optim.schedule")
    if not same or (old["train.steps"] if done is None else done) <= min(map(decays_from, (old, new))):
        free.add("train.steps")
    return [difference for difference in differences(began, now) if difference[0] not in free]


def decays_from(settings: Mapping[str, Any]) -> int:
    """The step from which on the learning rate depends on `train.steps`; -1 if it does from the first one. settings: by
    dotted keys."""
    steps, decay = settings["train.steps"], settings.get("train.optim.decay_steps") or 0
    return {"constant": steps, "wsd": steps - decay}.get(str(settings.get("train.optim.schedule")), -1)


def what_differs(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several groups of flat settings, its differences from the others: `canon_residual=false, steps=200`.
    Settings that a group lacks are left out of its text. A long text ends with a hash."""
    written = [{key: write(value) for key, value in one.items()} for one in groups]
    keys = [key for key in sorted(set().union(*written)) if len({one.get(key) for one in written}) > 1]
    leaves = Counter(map(leaf, keys))
    names = {key: leaf(key) if leaves[leaf(key)] == 1 else key for key in keys}
    return [_cut(", ".join(f"{names[key]}={one[key]}" for key in keys if key in one)) for one in written]


def leaf(key: str) -> str:
    """`train.optim.lr` → `lr`; `outside.mine.py:Block` → `mine.py:Block`"""
    return key.removeprefix(_OUTSIDE) if key.startswith(_OUTSIDE) else key.rpartition(".")[2]


def short(number: float | None) -> str:
    """`1,234,567` → `1.23 M`; missing → `–`."""
    return "–" if number is None else _rounded(number, {1e12: " T", 1e9: " B", 1e6: " M", 1e3: " k"})


def short_bytes(number: int | None) -> str:
    """`1,234,567` → `1.2 MB`; missing → `–`."""
    return "–" if number is None else readable(number)


def short_size(parameters: Any) -> str | None:
    """1364396032 → `1.36B`"""
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters <= 0:
        return None
    return _rounded(parameters, {1e12: "T", 1e9: "B", 1e6: "M", 1e3: "K"})


def _rounded(number: float, units: Mapping[float, str]) -> str:
    for size, unit in units.items():
        if number >= 0.9995 * size:  # 999,600 rounds to a million
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def write(value: Any) -> str:
    """Any value of a setting as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)


def exact(number: float) -> str:
    """`0.001`, `3e-05`: a text that no other number has, with six digits if they are enough."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG - 8]}… {digest(text)[:6]}"


def _hash(values: Mapping[str, Any]) -> str:
    pairs = (f"{key}={json.dumps(values[key], default=str, skipkeys=True)}" for key in sorted(values))
    return digest("\n".join(pairs))[:12]


def _among(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _is_place(key: str) -> bool:
    is_source = key.startswith("text.sources.") and key.endswith(".path")
    return is_source or key.startswith("text.validation.") or key == "model.weights"


def slug(text: str) -> str:
    """A file name that is safe on every file system: `text` itself if it is safe, else a name that ends with its
    hash, so that different texts have different names."""
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text[:MAX_LETTERS]).strip(".-")
    return text if safe == text and text else f"{safe}-{digest(text)[:6]}".lstrip("-")


def run_name(task: str, config: Config, usual: Config, swept: Collection[str] = ()) -> str:
    """`depo-llama-lr0.001-seed0`; with settings that differ from the preset's (`usual`):
    `depo-llama-4L256d-steps200-lr0.001-seed0`. Many such settings become a hash; those whose keys are in `swept` then
    follow it: `depo-llama-4L256d-8a7a66-batch_size32-lr0.001-seed0`."""
    changed = {key: value for key, _, value in differences(usual, config)}
    shape = [changed.pop(f"model.{name}", None) for name in SHAPE]
    parts = [slug(task), slug(config["arch"])]
    if any(shape):
        model, heads = config["model"], shape.pop()
        shown = [name for name in SHAPE if name != "num_attention_heads" or heads]
        parts.append("".join(f"{model[name]}{SHAPE[name]}" for name in shown))
    if changed and _clear(changed) is None:
        apart = {key: changed.pop(key) for key in swept if key in changed}
        parts += [_short(some) for some in (changed, apart) if some]
    elif changed:
        parts.append(_short(changed))
    optim = config["train"]["optim"]
    return within_limit("-".join(parts), f"-lr{exact(optim['lr'])}-seed{config['train']['seed']}")


def within_limit(begin: str, end: str) -> str:
    """The name `begin` + `end`; if it is longer than MAX_NAME, with the end of `begin` replaced by a hash of it."""
    if len(begin) + len(end) <= MAX_NAME:
        return begin + end
    return f"{begin[: MAX_NAME - len(end) - 13]}-{digest(begin)[:12]}{end}"


def _short(changed: dict[str, Any]) -> str:
    pairs = (f"{key}={write(value)}" for key, value in sorted(changed.items()))
    return _clear(changed) or digest("\n".join(pairs))[:6]


def _clear(changed: dict[str, Any]) -> str | None:
    """The settings themselves, if they are short and a valid name; else None."""
    texts = {key: write(value) for key, value in sorted(changed.items())}
    name = "-".join(f"{leaf(key)}{'' if text[:1].isdigit() else '='}{text}" for key, text in texts.items())
    clear = len(name) <= LONG_IN_NAME and slug(name) == name and len({*map(leaf, texts)}) == len(texts)
    return name if clear else None

"""Our names of architectures, Canon sites, difficulties and questions, as the release and the paper write them.

`counterparts` goes the other way.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from canonlm.experiments.published.benchmarks import DIFFICULTIES
from canonlm.runs.evaluated import difference
from canonlm.runs.identity import ABSENT, write
from canonlm.runs.load import MAX_LABEL
from canonlm.runs.rows import one_line

_TITLES = {
    **{"llama": "Llama", "gla5": "GLA5", "gdn2": "GDN2", "mamba2": "Mamba2"},
    **{"gla": "GLA", "gdn": "GDN", "mamba2-4.1": "Mamba2(mlp)", "llama-nope": "Llama-nope"},
}
"""Base architectures as the release and the paper write them."""

_WORDS = {"nores": "no-res", "frozen": "frozen", "silu": "silu", "bias": "bias"}
"""Variants that have a word in the release, and the word; it has one for the kernel size, too."""

_OF_DATA = ("bos_token_id", "eos_token_id")

_ONCE = ("fda", "swde", "squad_completion")
_TWICE = {"canonlm_fda_twice": "fda", "canonlm_swde_twice": "swde", "canonlm_squad_twice": "squad_completion"}
"""Tasks of the harness in which the text with the answer is given once and twice."""

_DIGEST = "_sha256"
_IN_THE_NAME = ("k", "background", "task", "length", "seq_len", "batch_size")
"""Settings that the name of an evaluation has, and the batch size, on which no answer depends but by rounding."""


def split_arch(arch: str, fields: Mapping[str, Any] | None = None) -> tuple[str, str | None]:
    """(architecture without Canon, sites): `gla5+canon` → `GLA5`, `AbCD`; `llama+canon=AC:nores+rope=0.25` →
    `Llama+rope=0.25`, `AC(no-res)`. Sites are None if the name is unknown.

    fields: settings of a configuration besides the name, as earlier versions had; those of Canon go to the sites.
    """
    base, *parts = arch.split("+")
    others = sorted(part for part in parts if not re.match(r"(canon|frozen)\b", part))
    fields = {key: value for key, value in (fields or {}).items() if key not in _OF_DATA}
    others += [f"{key}={write(value)}" for key, value in sorted(fields.items()) if not key.startswith("canon_")]
    plain = base.removesuffix("-conv")
    try:
        from canonlm.models import names

        known = names.resolve(arch, hidden_size=1024, num_heads=16) | fields
    except ValueError:
        return arch, None
    texts = dict.fromkeys(known.get("canon_sets") or [known.get("canon_set", "")])
    return "+".join([_TITLES.get(plain, plain), *others]), ",".join(_canon_cell(text, known) for text in texts)


def _canon_cell(text: str, fields: Mapping[str, Any]) -> str:
    """Canon sites as the release writes them, `AC(no-res,k3)`; in our notation if it has no word, `KVOM:scaled`."""
    from canonlm.canon.sites import SITES, Variant, parse, write
    from canonlm.models.config import OF_CANON

    usual = Variant(**{name: fields[key] for key, name in OF_CANON.items() if key in fields})
    sites = parse(text, default=usual)
    letters, *flags = write({letter: variant for letter, variant in sites.items() if SITES[letter].forms}).split(":")
    known = [flag for flag in _WORDS if flag in flags] + [flag for flag in flags if re.fullmatch(r"k\d+", flag)]
    if not letters or "," in letters or len(known) < len(flags):
        return write(sites) or "none"
    words = ",".join(_WORDS.get(flag, flag) for flag in known)
    return write(dict.fromkeys(sites, Variant())) + (f"({words})" if words else "")


def setting_of(task: Mapping[str, Any]) -> str:
    """The name of the difficulty if it is one of the paper's, else all settings of the task."""
    spec = _present(task)
    spec.pop("name", None)
    for name, known in DIFFICULTIES.get(str(task.get("name")), {}).items():
        if spec == _present(known):
            return name
    return one_line(", ".join(f"{key}={value}" for key, value in spec.items()), MAX_LABEL)


def _present(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are set: later versions have more settings, which are absent unless set."""
    return {key: value for key, value in settings.items() if value not in ABSENT}


def question_of(suite: str, name: str, measure: str) -> tuple[str, str, str]:
    """(task, slice, metric) as the published results have them."""
    if suite == "multihop":
        return suite, name, measure
    if suite == "babilong":
        return suite, name.removeprefix("babilong-"), measure
    if suite == "harness" and name.startswith("niah_single_") and measure.isdecimal():
        return name, f"{int(measure) / 1024:g}k", "contains"  # the harness names a needle's score by its length
    if suite == "harness" and name in _ONCE:
        return name, "once", measure
    if suite == "harness" and name in _TWICE:
        return _TWICE[name], "twice", measure
    return name, "all", measure


def setting_of_suite(suite: str, settings: Mapping[str, Any], seed: Any = 0) -> str | None:
    """All settings that are not the suite's defaults, so that numbers with the same name answer the same question:
    `fair, 5 people, n=20`. None for the defaults, and for the settings of the published results.

    Multi-hop questions are `fair` unless they have the published distribution, in which the place in the text gives
    answers away. A file is its name and the beginning of its sha256, wherever it lies. seed: that of the evaluated run,
    for suites that ask with it by default.
    """
    from canonlm.suites.settings import defaults

    # Files of earlier versions have fewer settings.
    if settings and any(not difference(settings, [each]) for each in _published(suite)):
        return None
    parts, named = [], {*_IN_THE_NAME}
    if suite == "playground" and isinstance(task := settings.get("task"), dict):
        parts = [setting_of(task)]
    if suite == "multihop" and settings.get("published") is False:
        parts = ["fair", *([f"{settings['people']} people"] if "people" in settings else [])]
        named |= {"published", "people"}
    if suite == "babilong" and settings.get("text") != "dataset":
        parts = [_written("facts", {"facts": "simulator", **settings})]
        named.add("facts")
    usual = defaults(suite)
    others = difference(settings, [usual | ({"seed": seed} if usual.get("seed", 0) is None else {})])
    parts += [
        key if others[key] is True else f"{key.removesuffix(_DIGEST)}={_written(key, settings)}"
        for key in others
        if key not in named and not (key.endswith(_DIGEST) and key.removesuffix(_DIGEST) in settings)
    ]
    return one_line(", ".join(parts), MAX_LABEL) or None


@cache
def _published(suite: str) -> list[dict[str, Any]]:
    from canonlm.suites.settings import PromptOptions, published_settings

    return [each.model_dump() | PromptOptions()._asdict() for each in published_settings(suite)]


def _written(key: str, settings: Mapping[str, Any]) -> str:
    """A value as text; of a file or folder with a digest, its name and the beginning of the digest."""
    if key.endswith(_DIGEST):
        return str(settings[key])[:8]
    digest = settings.get(key + _DIGEST)
    return f"{Path(str(settings[key])).name} {str(digest)[:8]}" if digest else write(settings[key])

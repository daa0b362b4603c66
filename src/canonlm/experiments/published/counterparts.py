"""How to train a cell of the paper's grids: our names of architectures, sizes and difficulties."""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

UNREAD = "rope=?"
"""Ends the architecture of a column whose share of rotary embedding could not be read in its figure."""

_BASES = {"GLA": "gla", "GDN": "gdn", "Mamba2(mlp)": "mamba2-4.1", "Llama": "llama", "Llama-nope": "llama-nope"}
_FLAGS = {"": "", "no-res": ":nores", "frozen": ":frozen"}
_LINEAR = {"none": "-conv", "b": "", "AbCD": "+canon"}
_HEAD = 64  # channels of a head in all of the paper's models
_PRESET = "8L512D"  # the size of the `paper` presets


class Counterpart(NamedTuple):
    """`arch`: our name, or "" if the paper's model has none, with the reason in `why`. `overrides`: those of its
    size."""

    arch: str
    overrides: tuple[str, ...] = ()
    why: str = ""

    @property
    def arguments(self) -> str:
        """The arguments that train it, after `canonlm play TASK --preset paper --difficulty SETTING`; "" if none do."""
        return shlex.join(["--arch", self.arch, *self.overrides]) if self.arch else ""


def counterpart(row: Mapping[str, Any]) -> Counterpart:
    """The counterpart of a row of `canonlm.experiments.published.grids`, by its `arch`, `canon` and `size`."""
    base, *others = row["arch"].split("+")
    sites, _, flag = row["canon"].rstrip(")").partition("(")
    if base in ("Llama", "Llama-nope"):
        canon = {"none": "", "ABCD": "+canon" + _FLAGS[flag]}.get(sites, f"+canon={sites}{_FLAGS[flag]}")
    else:
        canon = _LINEAR[row["canon"]]
    if UNREAD in others:
        known = [other for other in others if other != UNREAD]
        names = [_named(base, canon, [*known, *rope]) for rope in ([], ["rope=0.5x0.5"])]
        return Counterpart("", why="how much rotary embedding this column of the figure has could not be read: "
                           f"it is {' or '.join(names)}")  # fmt: skip
    layers, width = row["size"].removesuffix("D").split("L")
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": int(width) // _HEAD}
    changed = () if row["size"] == _PRESET else tuple(f"model.{key}={value}" for key, value in sizes.items())
    return Counterpart(_named(base, canon, others), changed)


def _named(base: str, canon: str, others: list[str]) -> str:
    return "+".join([_BASES[base] + canon, *others])

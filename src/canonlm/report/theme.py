"""How charts look: one theme, light and dark, and one fixed look per architecture.

Architectures differ in two ways: by colour (after Okabe & Ito, safe for colour-blind readers) and by line, marker
and bar pattern, so that a black-and-white print still reads. Text from runs is escaped, as plotly reads labels as HTML.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

INK, MUTED, GRID, PAPER = "#1b1f24", "#59636e", "#e4e7eb", "#ffffff"
DARK = {  # every colour used in a figure → the same colour on a dark page
    INK: "#e8eaed", MUTED: "#9aa4af", GRID: "#2c3238", PAPER: "#14171a",
    "#0072b2": "#4fa8e8", "#d55e00": "#ff8f52", "#009e73": "#2fc99b", "#b8588f": "#eaa0cc",
    "#b27a00": "#ffc24d", "#4b3fa7": "#a79bff", "#666666": "#bdbdbd",
}  # fmt: skip
COLORS = {name: (color, DARK[color]) for name, color in
          (("ink", INK), ("muted", MUTED), ("grid", GRID), ("paper", PAPER))}  # fmt: skip
"""For a light page and for a dark one."""
FONT = '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif'


@dataclass(frozen=True)
class Look:
    color: str
    dash: str
    symbol: str
    pattern: str


LOOKS = {
    "llama": Look("#d55e00", "dash", "square-open", "/"),
    "llama+canon": Look("#0072b2", "solid", "circle", ""),
    "gla5": Look("#b27a00", "dash", "diamond-open", "\\"),
    "gla5+canon": Look("#4b3fa7", "solid", "diamond", ""),
    "gdn2": Look("#b8588f", "longdash", "triangle-up-open", "x"),
    "gdn2+canon": Look("#009e73", "solid", "triangle-up", ""),
    "mamba2": Look("#666666", "dashdot", "cross-open", "-"),
    "mamba2+canon": Look(INK, "solid", "cross", ""),
}


def looks(archs: Sequence[str]) -> dict[str, Look]:
    """The look of each architecture. Known ones always look the same. Others take a free look of their kind (with or
    without Canon), then any free look, then the colour of one look with the line and marker of others in turn."""
    free = [name for name in LOOKS if name not in archs]
    mixed = itertools.cycle(
        replace(look, color=every[(place + shift) % len(every)].color)
        for every in [[*LOOKS.values()]]
        for shift in range(1, len(every))
        for place, look in enumerate(every)
    )
    chosen = {}
    for arch in dict.fromkeys(archs):
        if arch in LOOKS:
            chosen[arch] = LOOKS[arch]
        elif free:
            name = next((name for name in free if ("+canon" in name) == ("+canon" in arch)), free[0])
            free.remove(name)
            chosen[arch] = LOOKS[name]
        else:
            chosen[arch] = next(mixed)
    return chosen

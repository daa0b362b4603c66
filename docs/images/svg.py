"""A sheet of paper for small drawings: boxes, arrows and rows of tokens, as plain SVG text.

A drawing has its own white background, so it reads on dark pages, too. Fonts are the reader's; tokens are monospaced,
so their width is known well enough to put boxes around them.
"""

from collections.abc import Iterable
from html import escape
from itertools import pairwise
from math import hypot

WIDTH, EDGE = 720, 28
INK, MUTED, LINE, WASH = "#1b1f24", "#59636e", "#c9ced4", "#f3f5f7"
BLUE, GREEN, ORANGE = "#0062a3", "#007a55", "#c24e00"
TINT = {BLUE: "#e2effa", GREEN: "#dcf4ea", ORANGE: "#fdebdd", INK: WASH, MUTED: "none"}
ROLES = {"marker": MUTED, "context": INK, "question": BLUE, "answer": GREEN}
SANS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
LETTER = 0.61  # width of a monospaced letter, in heights

Point = tuple[float, float]


class Sheet:
    """Everything is in pixels, y downwards; `y` is where the next row of tokens or line of text belongs."""

    def __init__(self, title: str, asks: str) -> None:
        self.title, self.y = title, 50.0
        self.parts: list[str] = []
        self.text((EDGE, 44), asks, size=17, anchor="start", bold=True)

    def text(
        self, at: Point, words: str, *, size: float = 14, color: str = INK, anchor: str = "middle", bold: bool = False,
        mono: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        font = f' font-family="{MONO}"' if mono else ""
        self._add(
            f'<text x="{at[0]:g}" y="{at[1]:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{color}"{weight}'
            f"{font}>{escape(words)}</text>"
        )

    def box(
        self, left: float, top: float, width: float, height: float, color: str = INK, *, strong: bool = False
    ) -> None:
        line = color if strong or color not in (INK, MUTED) else LINE
        dash = ' stroke-dasharray="3 3"' if color == MUTED else ""
        self._add(
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6" fill="{TINT[color]}" '
            f'stroke="{line}" stroke-width="{2 if strong else 1}"{dash}/>'
        )

    def chip(self, at: Point, name: str, color: str = INK, *, strong: bool = False, size: float = 14) -> float:
        """A token, centred. Returns the width of its box."""
        width = _chip(name, size)
        self.box(at[0] - width / 2, at[1] - size, width, 2 * size, color, strong=strong)
        self.text((at[0], at[1] + size * 0.35), name, size=size, color=color, mono=True)
        return width

    def tokens(
        self, shown: Iterable[tuple[str, str]], *, size: float = 14, gap: float = 4, between: float = 10
    ) -> list[Point]:
        """A row of (name, role), as `task.show` gives them, broken where the sheet ends. Returns their centres."""
        x, y, centres = float(EDGE), self.y + size, []
        for name, role in shown:
            width = _chip(name, size)
            if x + width > WIDTH - EDGE:
                x, y = float(EDGE), y + 2 * size + between
            x += width / 2
            self.chip((x, y), name, ROLES[role], size=size)
            centres.append((x, y))
            x += width / 2 + gap
        self.y = y + size
        return centres

    def arrow(self, start: Point, stop: Point, color: str = INK, *, cut: float = 20, bold: bool = False) -> None:
        """Straight, from `cut` pixels after `start` to `cut` pixels before `stop`."""
        dx, dy = stop[0] - start[0], stop[1] - start[1]
        ux, uy = cut * dx / hypot(dx, dy), cut * dy / hypot(dx, dy)
        self.path(f"M{start[0] + ux:.1f} {start[1] + uy:.1f} L{stop[0] - ux:.1f} {stop[1] - uy:.1f}", color, bold=bold)

    def arc(self, start: Point, stop: Point, color: str, *, height: float, bold: bool = False) -> None:
        """From above one token to above another, bent upwards."""
        (x1, y1), (x2, y2) = start, stop
        self.path(f"M{x1:g} {y1:g} C{x1:g} {y1 - height:g} {x2:g} {y2 - height:g} {x2:g} {y2:g}", color, bold=bold)

    def path(self, d: str, color: str = INK, *, bold: bool = False, head: bool = True) -> None:
        end = f' marker-end="url(#{_HEADS[color]})"' if head else ""
        self._add(f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{2.5 if bold else 1.4}"{end}/>')

    def line(self, start: Point, stop: Point, color: str = LINE, *, bold: bool = False) -> None:
        self.path(f"M{start[0]:g} {start[1]:g} L{stop[0]:g} {stop[1]:g}", color, bold=bold, head=False)

    def chain(self, points: list[Point], color: str, *, cut: float = 20) -> None:
        for start, stop in pairwise(points):
            self.arrow(start, stop, color, cut=cut, bold=True)

    def svg(self) -> str:
        height = self.y + EDGE
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{color}"/></marker>'
            for color, name in _HEADS.items()
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
                f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{SANS}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{heads}</defs>",
                f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="12" fill="#ffffff" '
                f'stroke="{LINE}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def _add(self, element: str) -> None:
        self.parts.append(element)


_HEADS = {INK: "ink", MUTED: "muted", LINE: "line", BLUE: "blue", GREEN: "green", ORANGE: "orange"}


def _chip(name: str, size: float) -> float:
    return max(2, len(name)) * size * LETTER + 12

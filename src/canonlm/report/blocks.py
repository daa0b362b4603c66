"""The blocks of pages, as plain data: a page is one JSON value, which the scripts in `web` draw.

A block is a dict with one key, its kind (`BLOCKS` in web/page.js). All text in it is shown as text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from canonlm.report.format import Quantity, count_of, hint_of, percent, small_of, span
from canonlm.report.theme import COLORS, DARK, FONT, Look
from canonlm.runs.load import Run
from canonlm.runs.rows import Evaluation
from canonlm.runs.seed_statistics import SEEDS_OF_INTERVAL, Spread
from canonlm.runs.summary import Difference, wilson

Block = dict[str, Any]
Cell = str | dict[str, Any]

# The policy blocks everything from outside, whatever the page contains.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
NO_SCRIPT = "This page needs JavaScript; canonlm report --table and canonlm results print the numbers in a terminal."


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], marks: Sequence[str] = (), kind: str = "") -> Block:
    """marks: a class for each row: best, aside. kind: words, if cells are texts and not numbers."""
    return {"table": {"head": list(head), "rows": rows, "marks": list(marks), "kind": kind or None}}


def fold(title: str, blocks: Sequence[Block], *, opened: bool = False) -> list[Block]:
    """Blocks that a click on their title shows; nothing if there are none."""
    return [{"fold": {"title": title, "blocks": blocks, "open": opened}}] if blocks else []


def chart(name: str, caption: str, drawn: Mapping[str, Any]) -> Block:
    """drawn: panels and series, as described at the top of web/chart.js. name: of the chart on its page."""
    return {"chart": {"id": name, "caption": caption, **drawn}}


def caveat(limits: Sequence[str]) -> list[Block]:
    """The first limit in a line, and the number of others; nothing if there is none."""
    if not limits:
        return []
    more = f" ({len(limits) - 1} more below.)" if len(limits) > 1 else ""
    return [{"caveat": f"Before you conclude: {limits[0][:1].lower()}{limits[0][1:]}{more}"}]


def cell(text: str, small: str = "", hint: str = "") -> Cell:
    """small: below the text. hint: shown on hover."""
    more = {key: value for key, value in (("small", small), ("hint", hint)) if value}
    return {"text": text, **more} if more else text


def spread_cell(spread: Spread | None, quantity: Quantity, runs: int, remark: str = "") -> Cell:
    """A value with its interval and a remark below; a share has a bar under it. runs: the number of runs that the row
    shows."""
    if spread is None:
        return "–"
    small = ",\n".join(filter(None, (small_of(spread, quantity.say, runs), remark)))  # the page shows one line
    hint = hint_of(spread, quantity.say)
    share = {"share": round(100 * spread.mean, 1)} if quantity.say is percent else {}
    return {"text": quantity.say(spread.mean), "small": small, "hint": hint, **share}


def difference_cell(difference: Difference | None, quantity: Quantity, pairs: int) -> Cell:
    """A difference with its interval below. pairs: the number of pairs that the row shows."""
    if difference is None:
        return "–"
    small = "no interval" if difference.pairs < SEEDS_OF_INTERVAL else "all equal"
    if difference.low < difference.high:
        small = f"{quantity.gap(difference.low)} to {quantity.gap(difference.high)}"
    count = count_of(difference.pairs, "pair")
    low, high = quantity.gap(min(difference.values)), quantity.gap(max(difference.values))
    hint = f"{count} of runs" + (f", from {low} to {high}" if low != high else "")
    return cell(quantity.gap(difference.mean), f"{small}, {count}" if difference.pairs != pairs else small, hint)


def state_cell(run: Run) -> Cell:
    """`finished`, or `unfinished` with the step below."""
    state, _, step = run.state.partition(" ")
    return cell(state, step)


def value_cell(row: Evaluation | None, key: str, quantity: Quantity) -> Cell:
    """The score of one run: an accuracy with its counts and its 95 % interval, or a measure."""
    value = row.value(key) if row else None
    if row is None or value is None:
        return "–"
    count = row.slices.get(key)
    return cell(quantity.say(value), f"{count.correct:,} of {count.total:,}, {span(*wilson(count))}" if count else "")


def page(
    title: str, facts: Sequence[str], blocks: Sequence[Block], looks: Mapping[str, Look], *, views: Sequence[str] = (),
    **data: Any,
) -> str:  # fmt: skip
    """The page as HTML. views: scripts of `web` besides those of every page, with their templates. data: more data for
    the scripts."""
    web = _web()
    shown = [name for name in views if f"{name}.html" in web]
    payload = {
        "title": title, "facts": list(facts), "blocks": list(blocks),
        "views": shown, "font": FONT, "colors": COLORS,
        "looks": {name: asdict(look) | {"color": (look.color, DARK[look.color])} for name, look in looks.items()},
    } | data  # fmt: skip
    variables = ["".join(f"--{name}: {pair[place]}; " for name, pair in COLORS.items()) for place in (0, 1)]
    style = (
        f":root {{ {variables[0]}}} @media screen and (prefers-color-scheme: dark) {{ :root {{ {variables[1]}}} }}\n"
        f"body {{ font: 16px/1.5 {FONT}; }}\n{web['style.css']}"
    )
    templates = "\n".join(f'<template id="view-{name}">{web[f"{name}.html"]}</template>' for name in shown)
    from plotly.offline import get_plotlyjs  # of an extra, and tables in a terminal need none

    names = [f"{name}.js" for name in ("draw", "chart", *views, "page")]
    scripts = "\n".join(web[name] for name in names if name in web)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title.replace("&", "&amp;").replace("<", "&lt;")}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main></main>
<noscript><p>{NO_SCRIPT}</p></noscript>
{templates}
<script type="application/json" id="page-data">{_inert(payload)}</script>
<script>{scripts}</script>
<script type="text/plain" id="plotly">{get_plotlyjs()}</script>
</body>
</html>
"""


def _inert(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


@cache
def _web() -> dict[str, str]:
    """The files in `web`, by name."""
    return {file.name: file.read_text("utf-8") for file in (files(__package__) / "web").iterdir() if file.is_file()}

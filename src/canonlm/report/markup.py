"""The few pieces of HTML that the page is made of. What goes in as text comes out escaped."""

import html
from collections.abc import Iterable, Sequence

from ..runs.rows import Evaluation
from .summary import Difference, Spread, wilson
from .words import Quantity, count_of, percent, span


def inert(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def bullets(items: Iterable[str]) -> str:
    inner = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{inner}</ul>" if inner else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[bool] = (), text: bool = False) -> str:
    marks = [" class=best" if mark else "" for mark in best] or [""] * len(rows)
    body = "".join(f"<tr{mark}>{''.join(row)}</tr>" for row, mark in zip(rows, marks, strict=True))
    titles = "".join(f"<th scope=col>{escape(title)}</th>" for title in head)
    kind = " class=text" if text else ""
    return f"<div class=scroll><table{kind}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def row_head(text: str) -> str:
    return f"<th scope=row>{escape(text)}</th>"


def cell(text: str, small: str = "", hint: str = "") -> str:
    """`hint`: what hovering shows."""
    return f"<td{_hint(hint)}>{_with_small(text, small)}</td>"


def spread_cell(spread: Spread | None, quantity: Quantity, runs: int) -> str:
    """A value with its interval below; a share is underlined as far as it goes. `runs`: how many are said beside it."""
    if spread is None:
        return cell("–")
    small, hint = spread.small(quantity.say, runs), spread.about(quantity.say)
    if quantity.say is not percent:
        return cell(quantity.say(spread.mean), small, hint)
    inner = _with_small(percent(spread.mean), small)
    return f'<td class=share style="--share:{100 * spread.mean:.1f}%"{_hint(hint)}>{inner}</td>'


def difference_cell(found: Difference | None, quantity: Quantity, pairs: int) -> str:
    """A difference with its interval below. `pairs`: how many are said beside it."""
    if found is None:
        return cell("–")
    interval = f"{quantity.gap(found.low)} to {quantity.gap(found.high)}" if found.low < found.high else ""
    small = interval or ("no interval" if found.pairs == 1 else "all equal")
    count = count_of(found.pairs, "pair")
    least, most = quantity.gap(min(found.values)), quantity.gap(max(found.values))
    hint = f"{count} of runs" + (f", from {least} to {most}" if least != most else "")
    return cell(quantity.gap(found.mean), f"{small}, {count}" if found.pairs != pairs else small, hint)


def value_cell(row: Evaluation | None, key: str, quantity: Quantity) -> str:
    """What one run scored: an accuracy with its counts and its 95 % interval, or a measure."""
    value = row.value(key) if row else None
    if row is None or value is None:
        return cell("–")
    count = row.slices.get(key)
    return cell(quantity.say(value), f"{count.correct:,} of {count.total:,}, {span(*wilson(count))}" if count else "")


def _hint(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _with_small(text: str, small: str) -> str:
    return escape(text) + (f"<small>{escape(small)}</small>" if small else "")

"""The few pieces of HTML that the page is made of. What goes in as text comes out escaped."""

import html
from collections.abc import Iterable, Sequence

from .runs import Evaluation
from .summary import Difference, Spread, wilson
from .words import Quantity, percent, span


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


def cell(text: str, small: str = "") -> str:
    return f"<td>{_with_small(text, small)}</td>"


def spread_cell(spread: Spread | None, quantity: Quantity) -> str:
    """A value with its range below; a share is underlined as far as it goes."""
    if spread is None:
        return cell("–")
    small = span(spread.low, spread.high, quantity.say) if spread.kind != "one run" else ""
    if quantity.say is not percent:
        return cell(quantity.say(spread.mean), small)
    inner = _with_small(percent(spread.mean), small)
    return f'<td class=share style="--share:{100 * spread.mean:.1f}%">{inner}</td>'


def difference_cell(found: Difference | None, quantity: Quantity) -> str:
    if found is None:
        return cell("–")
    small = f"{quantity.gap(found.low)} to {quantity.gap(found.high)}" if found.pairs > 1 else ""
    return cell(quantity.gap(found.mean), small)


def value_cell(row: Evaluation | None, key: str, quantity: Quantity) -> str:
    """What one run scored: an accuracy with its counts and its 95 % interval, or a measure."""
    value = row.value(key) if row else None
    if row is None or value is None:
        return cell("–")
    count = row.slices.get(key)
    return cell(quantity.say(value), f"{count.correct:,} of {count.total:,}, {span(*wilson(count))}" if count else "")


def _with_small(text: str, small: str) -> str:
    return escape(text) + (f"<small>{escape(small)}</small>" if small else "")

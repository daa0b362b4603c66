"""The few pieces of HTML that the page is made of. What goes in as text comes out escaped."""

import html
from collections.abc import Iterable, Sequence

from .runs import Count
from .summary import Spread
from .words import percent, span


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


def share_cell(spread: Spread | None) -> str:
    """A share with its range below, underlined as far as it goes."""
    if spread is None:
        return cell("–")
    inner = _with_small(percent(spread.mean), span(spread))
    return f'<td class=share style="--share:{100 * spread.mean:.1f}%">{inner}</td>'


def count_cell(count: Count | None) -> str:
    return cell("–") if count is None else cell(percent(count.accuracy), f"{count.correct:,} of {count.total:,}")


def _with_small(text: str, small: str) -> str:
    return escape(text) + (f"<small>{escape(small)}</small>" if small else "")

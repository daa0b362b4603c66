"""Reads reports back: the data, charts and visible text of a page, and what a terminal shows."""

import base64
import csv
import io
import json
import re
import zlib

from rich.console import Console

from canonlm import report


def page_of(folders):
    return report.render(report.load_play(folders))


def printed(folders, width=200):
    """The tables and lines of folders in a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for part in report.tables(report.load_play(folders)):
        console.print(part)
    return console.file.getvalue()


def evals_of(run):
    """The evaluations in the file of a run, read without our readers."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "eval"]


def embedded_json(page):
    """The JSON embedded in a page, as browsers read it: NaN is an error."""
    text = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text, parse_constant=_refuse)


def _refuse(text):
    raise ValueError(text)


def blocks(page, kind):
    """All blocks of a kind on the page."""
    return [of for block in _walk(embedded_json(page)["blocks"]) for key, of in block.items() if key == kind]


def charts(page):
    return {chart["id"]: chart for chart in blocks(page, "chart")}


def tables(page):
    """The tables as rows of texts, with small print after a line break."""
    return [[[_text(cell) for cell in row] for row in (each["head"], *each["rows"])] for each in blocks(page, "table")]


def numbers(page):
    """The rows of the file behind "Download the numbers"."""
    [sheet] = blocks(page, "sheet")
    text = zlib.decompress(base64.b64decode(sheet["deflated"])).decode()
    return list(csv.DictReader(io.StringIO(text)))


def row_heads(page):
    return [row[0] for each in tables(page) for row in each[1:]]


def visible_text(page):
    """All visible texts outside charts, a line each."""
    data = embedded_json(page)
    lines = [data["title"], " · ".join(data["facts"])]
    for block in _walk(data["blocks"]):
        for kind, of in block.items():
            if kind == "table":
                cells = [cell for row in (of["head"], *of["rows"]) for cell in row]
                lines += [_text(cell) for cell in cells] + [cell["hint"] for cell in cells if "hint" in cell]
            elif kind == "list":
                lines += of
            elif isinstance(of, str):
                lines.append(of)
            else:
                lines += [of.get("title") or "", of.get("caption") or ""]
    return "\n".join(lines)


def _walk(found):
    for block in found:
        yield block
        for of in block.values():
            yield from _walk(of["blocks"]) if isinstance(of, dict) and "blocks" in of else ()


def _text(cell):
    if isinstance(cell, str):
        return cell
    parts = [_text(part) for part in cell.get("parts", [])]
    return "\n".join(filter(None, [cell["text"], cell.get("small", ""), *parts]))

"""The ledger of claims as an HTML page and as Markdown."""

import re
from collections.abc import Sequence
from html import escape as html_escape

from canonlm.experiments.claims import STATES, Claim, Estimate, after_all, summary
from canonlm.report.blocks import Block, Cell, cell, chart, fold, page, table
from canonlm.report.charts import Chart, series_of
from canonlm.report.theme import Look

TITLE = "What the paper claims, and what runs say"
LEAD = (
    "Claims of Physics of Language Models, Part 4, in our words; C51 is about a test by others. Verdicts come from at "
    "least five fresh seeds, at a learning rate that other seeds chose. Sizes are far below the paper's, so our number "
    "and the paper's do not estimate the same thing. Claims about the published models come from their own tables."
)
IF_AS_THESE = "if further runs differ as these do"
MARK = "†"
"""The mark of intervals that hold only if further runs differ as these do."""

READINGS = (
    f"The first interval decides. Of accuracies and speeds it holds whatever the distribution of runs is (if runs with "
    f"equal seeds are independent or positively correlated), and the second one holds if further runs differ as these "
    f"do. Rows with {MARK} have no such first interval, as losses, divergences and bits have no bounds, and published "
    f"tables have three or four numbers: theirs holds if further runs differ as these do."
)
LOOKS = {
    "supported": Look("#009e73", "solid", "circle", ""),
    "contradicted": Look("#d55e00", "solid", "square-open", ""),
    "undecided": Look("#666666", "solid", "diamond", ""),
}
"""The looks of comparisons in the chart, by their states."""

LOST = ("6d47b16289e6", "a7f2ace14711")
"""Commits that rows of ours name and no repository has."""

FOREST = "Differences in points with 95 % intervals, one line for each comparison. Hover to see what is compared."
WORDS = {
    "supported": "every comparison came out as the claim says, by at least the smallest difference that matters",
    "supported in part": "some comparisons came out as the claim says, or all of those that test a part of it",
    "contradicted": "a comparison came out the other way, or a difference that matters is ruled out",
    "undecided": "the seeds do not decide, or something else may explain the difference",
    "untested": "nothing was trained or measured for it yet",
}


def html(entries: Sequence[Claim]) -> str:
    """One self-contained page: a table for each verdict, then a chart of all estimates in points."""
    more = after_all(entries)
    blocks: list[Block] = [{"answer": f"{summary(entries)}."}, {"note": f"{LEAD} {READINGS} {more}".strip()}]
    for state in STATES:
        of_state = [each for each in entries if each.state == state]
        shown = _table(of_state) if state != "untested" else _untested(of_state)
        about = {"note": f"{WORDS[state].capitalize()}."}
        opened = state not in ("undecided", "untested")
        blocks += fold(f"{state.capitalize()} ({len(of_state)})", [about, shown] if of_state else [], opened=opened)
    rows = [(each, estimate) for each in entries for estimate in each.estimates if estimate.unit == "points"]
    if rows:
        blocks[2:2] = fold("All estimates in points in one chart", [chart("estimates", FOREST, _forest(rows))])
    return page(TITLE, [], blocks, LOOKS)


def _forest(rows: Sequence[tuple[Claim, Estimate]]) -> Chart:
    """The estimates, the first claim on top. Comparisons of a claim share its name, so lines have numbers."""
    series = []
    for state in LOOKS:
        chosen = [(len(rows) - place, *row) for place, row in enumerate(rows) if row[1].state == state]
        points = [(estimate.value, place) for place, _, estimate in chosen]
        ends = {"low": [e.low for *_, e in chosen], "high": [e.high for *_, e in chosen]}
        hover = [f"{claim.id} {e.what}\n{e}\n{e.note}" for _, claim, e in chosen]
        series.append(series_of("dots", state, points, run=state, across=True, hover=hover, **ends))
    zero = {"panel": 0, "kind": "level", "name": "no difference", "x": [0, 0], "y": [0, len(rows) + 1]}
    first = [place for place, row in enumerate(rows) if place == 0 or rows[place - 1][0].id != row[0].id]
    ticks = [(len(rows) - place, rows[place][0].id) for place in first]
    y = {"ticks": ticks, "even": True, "range": [0.2, len(rows) + 0.8]}
    return {
        "height": 22 * len(rows),
        "panels": [{"title": "", "x": {"title": "points"}, "y": y}], "series": [zero, *(s for s in series if s["x"])],
    }  # fmt: skip


def _table(entries: Sequence[Claim]) -> Block:
    rows: list[list[Cell]] = []
    for each in entries:
        about = [(_with_state(each, e), f"{e.what} ({note(e)})" if note(e) else e.what) for e in each.estimates]
        estimates: Cell = {"text": "", "parts": [cell(*of) for of in about]}
        evidence = cell(each.source, " · ".join(facts_of(each)))
        rows.append([each.id, cell(each.text, each.reason), estimates, each.paper or "–", evidence])
    return table(["claim", "in our words", "estimate, 95 % interval", "the paper", "evidence"], rows, kind="words")


def _with_state(claim: Claim, estimate: Estimate) -> str:
    """The estimate, its mark, and the verdict on this part if the parts of the claim may differ."""
    shown = f"{estimate} {MARK}" if estimate.assumes else str(estimate)
    return f"{shown} ({estimate.state})" if claim.state == "supported in part" else shown


def note(estimate: Estimate) -> str:
    """The rest of what is known about an estimate."""
    normal = f"the interval holds {IF_AS_THESE}" if estimate.assumes else ""
    if estimate.normal is not None:
        normal = f"{IF_AS_THESE}, {estimate.interval(estimate.normal)}"
    edge = f"at the edge of the rates tried: {', '.join(estimate.edge)}" if estimate.edge else ""
    return "; ".join(filter(None, (estimate.note, normal, edge)))


def _untested(entries: Sequence[Claim]) -> Block:
    return table(["claim", "in our words", "why not"], [[e.id, e.text, e.reason] for e in entries], kind="words")


def facts_of(claim: Claim) -> list[str]:
    done, runs = claim.runs
    facts = [f"{claim.seeds} seeds each"] if claim.seeds else []
    facts += [f"{done} of {runs} runs" if done < runs else f"{runs} runs"] if runs else []
    lost = dict.fromkeys(LOST, ", whose source is lost")
    return [*facts, *claim.machines, *(f"commit {commit[:10]}{lost.get(commit, '')}" for commit in claim.commits)]


def markdown(entries: Sequence[Claim]) -> str:
    """The same as a page of the documentation."""
    by = "`canonlm claims --out docs/claims.md` writes this page."
    parts = [f"# {TITLE}", "", f"{LEAD} {READINGS}", "", f"**{summary(entries)}.** {by}", ""]
    parts += [more, ""] if (more := after_all(entries)) else []
    for state in STATES:
        of_state = [each for each in entries if each.state == state]
        if not of_state:
            continue
        parts += [f"## {state.capitalize()}", "", f"{WORDS[state].capitalize()}.", ""]
        if state == "untested":
            parts += ["| | claim | why not |", "|---|---|---|"]
            parts += [f"| {each.id} | {_cell(each.text)} | {_cell(each.reason)} |" for each in of_state]
        else:
            parts += ["| | claim | estimate, 95 % interval | the paper | evidence |", "|---|---|---|---|---|"]
            parts += [f"| {each.id} | {_cells(each)} |" for each in of_state]
        parts.append("")
    return "\n".join(parts)


def _cells(claim: Claim) -> str:
    estimates = "<br>".join(f"{_cell(e.what)}: **{_with_state(claim, e)}**{_small(e)}" for e in claim.estimates)
    text = _cell(claim.text) + (f"<br>*{_cell(claim.reason)}*" if claim.reason else "")
    evidence = "; ".join([claim.source, *map(_literal, facts_of(claim))])
    return " | ".join([text, estimates, _cell(claim.paper) or "–", _cell(evidence)])


def _small(estimate: Estimate) -> str:
    """The other reading, and rates at an edge."""
    normal = "" if estimate.normal is None else f" {estimate.interval(estimate.normal)}"
    return normal + (f", rate at the edge: {', '.join(map(_cell, estimate.edge))}" if estimate.edge else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _literal(text: str) -> str:
    """A text from a file, which Markdown and HTML show as it is."""
    return re.sub(r"([\\`*\[\]])", r"\\\1", html_escape(text, quote=False))

"""The page of folders of runs. It opens from disk, loads nothing, and takes every number from the run folders."""

import base64
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from canonlm.core.files import write_text
from canonlm.experiments.published import names
from canonlm.report.blocks import Block, fold, page, table
from canonlm.report.evals import suite_tables
from canonlm.report.format import count_of, listed, sentence
from canonlm.report.play import LeftOut, Play, load_play
from canonlm.report.results_payload import of_runs, payload
from canonlm.report.section import section_blocks
from canonlm.report.text_section import text_blocks
from canonlm.report.theme import looks
from canonlm.runs.folder import Folders, as_paths
from canonlm.runs.load import Run, in_short
from canonlm.runs.table import RUN_COLUMNS, SCHEMA, measurements, write_csv

MAX_NAMES = 3


def write_report(folders: Folders, out: str | Path | None = None) -> Path:
    """Write the page of one folder or several and return its path. out: default: `report.html` in the folder, or in the
    current directory if there are several. Raises ValueError for a folder without runs."""
    return write_page(load_play(folders), place_of(folders, out))


def place_of(folders: Folders, out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    paths = as_paths(folders)
    return (paths[0] if len(paths) == 1 else Path()) / "report.html"


def write_page(play: Play, out: Path, *, live: bool = False) -> Path:
    """Write the page and return its path. live: runs are still in progress, so the page reloads itself."""
    write_text(out, render(play, live=live).encode("utf-8", "replace").decode())  # a row may contain a lone surrogate
    return out


def render(play: Play, *, live: bool = False) -> str:
    """The page as text."""
    archs = [a for section in play.sections for a in section.architectures]
    # A family at several sizes has a look, and so has each size.
    families = [a.family for part in play.parts for a in part.architectures]
    styles = looks([*families, *(a.arch for a in archs)])
    parts = [(section.heading, section_blocks(section, number)) for number, section in enumerate(play.sections)]
    parts += [(section.heading, text_blocks(section, number)) for number, section in enumerate(play.texts)]
    blocks: list[Block] = [{"section": {"title": title if len(parts) > 1 else "", "blocks": of_part}}
                           for title, of_part in parts]  # fmt: skip
    if not play.runs and not play.evaluated:
        blocks.append({"answer": "There is nothing to show yet: no run has recorded anything."})
    for title, note, head, rows in suite_tables(play.evaluated):
        blocks += fold(title, [{"note": note}, table(head, rows, kind="models")], opened=not parts)
    shown = of_runs(play.gathered)
    paper = len(shown.numbers.filter(source="paper")) > 0
    blocks += fold("Compared with the paper, cell by cell", [{"view": "grids"}] if paper else [])
    blocks += _closing(play)
    results = {"results": payload(shown)} if paper else {}
    return page(title_of(play), _facts(play), blocks, styles, views=("results", "grids") if paper else (),
                written=round(time.time()) if live else None, **results)  # fmt: skip


def title_of(play: Play) -> str:
    """The title of `play.json`, or else the question that the runs answer: `Depo, tiny: llama against llama+canon`."""
    if play.title or not play.parts:
        return play.title or listed([one.folder.resolve().name for one in play.gathered])
    names = list(dict.fromkeys(_task(part.heading, part.runs) for part in play.parts))
    archs = list(dict.fromkeys(run.arch for run in play.runs))
    first, *others = archs
    compared = f"{first} against {listed(others)}" if others else first
    compared = compared if len(archs) <= MAX_NAMES else count_of(len(archs), "architecture")
    return f"{listed(names) if len(names) <= MAX_NAMES else count_of(len(names), 'task')}: {compared}"


def _task(heading: str, runs: Sequence[Run]) -> str:
    presets = {str(run.config.get("preset") or "") for run in runs} - {""}
    named = heading if ".py:" in heading else sentence(heading)  # a file of the user keeps its name
    return ", ".join([named, *(presets if len(presets) == 1 else ())])


def _facts(play: Play) -> list[str]:
    runs, finished = play.runs, sum(run.finished for run in play.runs)
    facts = [count_of(finished, "finished run")]
    facts += [f"{len(runs) - finished} unfinished"] if len(runs) > finished else []
    for name, key in (("architecture", "arch"), ("learning rate", "lr"), ("seed", "seed")):
        facts.append(count_of(len({getattr(run, key) for run in runs}), name))
    facts += [f"{count_of(len(play.evaluated), 'saved model')} evaluated"] if play.evaluated else []
    return facts


def _closing(play: Play) -> list[Block]:
    remarks = [LeftOut(run.name, "; ".join(_remarks(run))) for run in play.runs if _remarks(run)]
    entries = [*play.left_out, *remarks]
    left_out = [f"{entry.name}: {entry.reason}" for entry in in_short(entries)]
    unknown = "The command was not recorded; the config.yaml of each run holds all its settings."
    command: Block = {"code": play.command} if play.command else {"text": unknown}
    return [
        *fold(f"What was left out ({len(entries)})", [{"list": left_out}] if left_out else []),
        *fold("Run it again", [command]),
        {"sheet": {"name": "report.csv", "deflated": _deflated(numbers_csv(play))}},
    ]


def _deflated(text: str) -> str:
    """A text for the page, compressed: the numbers would be most of the page."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


def numbers_csv(play: Play) -> str:
    """Every evaluation of every run and every result of `canonlm eval` as CSV, with the columns of `canonlm.load_runs`
    after that of the section, which is empty for the latter."""
    rows, _ = measurements(play.gathered, names, ("evaluation", "final", "suite"))
    listed_runs = [(part.heading, run.name) for part in play.parts for run in part.runs]
    sections = pl.DataFrame(listed_runs, {"section": pl.String, "run": SCHEMA["run"]}, orient="row")
    of_runs = sections.join(rows.filter(pl.col("kind") != "suite"), on="run", maintain_order="left_right")
    of_suites = rows.filter(pl.col("kind") == "suite").with_columns(section=pl.lit(""))
    columns = ("section", *RUN_COLUMNS)
    return write_csv(pl.concat([of_runs.select(columns), of_suites.select(columns)]))


def _remarks(run: Run) -> list[str]:
    averaged = ", not in the averages" if not run.sources else ""
    return [*([] if run.finished else [f"{run.state}{averaged}"]), *run.damage]

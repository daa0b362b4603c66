"""Our CSV files are plain data in spreadsheets: no cell of text is a formula, and every text is read back."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "report"))
from folders import evaluation, write_run

import canonlm.report
from canonlm.cli import main
from canonlm.report import load_play, numbers_csv, read_csv
from canonlm.runs import table

RUN = (
    "=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", '=HYPERLINK("http://x","y")', "=cmd|' /C calc'!A0",
    "-", "+", "'=1",
)  # fmt: skip
AS_THEY_ARE = (
    "", "a", "a=b", "1hop-0k", "-0.5", "+3", "-1e-5", ".5", "1.", "−0.5", "3 + 4", '"quoted"', "a,b", "a\nb", " =1",
)  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.builds(
    "".join, st.lists(st.sampled_from([*"'=+-@\t\r\n\",1.ae ", "x"]))
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def safe(cell):
    return not re.match("[=+\\-@\t\r\n]", cell) or re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", cell)


def cells_of(text):
    return [row[-1] for row in csv.reader(io.StringIO(text, newline=""))]


def test_spreadsheet_formulas_get_an_apostrophe():
    written = table.write_csv(pl.DataFrame({"one": "", "text": [*RUN, *AS_THEY_ARE]}))
    assert cells_of(written)[1:] == [*("'" + text for text in RUN), *AS_THEY_ARE]


@given(st.lists(st.tuples(TEXTS, TEXTS.filter(bool) | st.none(), NUMBERS.filter(lambda x: abs(x) < 1e300)), min_size=1))
def test_frames_round_trip(rows):
    numbers = table.results([{"model": a, "task": b, "value": float(c)} for a, b, c in rows])
    text = table.write_csv(numbers)
    result = list(csv.reader(io.StringIO(text, newline="")))
    place = [result[0].index(name) for name in ("model", "task")]
    assert all(safe(row[at]) for row in result[1:] for at in place)
    assert table.read_text(text).equals(numbers)


def test_names_that_look_like_numbers_stay_texts():
    pair = table.paired(
        table.results(
            {"model": name, "arch": "llama", "canon": sites, "lr": 1e-3, "seed": 0, "task": "depo", "value": 0.5}
            for name, sites in (("001", "none"), ("002", "ABCD"))
        )
    )
    read = table.read_text(table.write_csv(pair))
    assert read.select("base_model", "base_canon", "canon_model").row(0) == ("001", "none", "002")
    assert table.read_text("section,run\n007,1\n").row(0) == ("007", "1")


def test_files_of_earlier_versions_are_read():
    numbers = table.read_text("source,model,value,stderr,n\nyours,'=a,0.5,,7\n")
    assert numbers.row(0) == ("yours", "=a", 0.5, None, 7)
    assert numbers.columns[-1] == "total"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_downloads_of_the_pages_do_the_same():
    script = (
        (Path(canonlm.report.__file__).parent / "web" / "draw.js")
        .read_text()
        .partition("// -- downloads")[2]
        .partition("\n")[2]
        .partition("function save")[0]
    )
    rows = [[text, n, -0.5, None] for n, text in enumerate([*RUN, *AS_THEY_ARE])]
    program = f"{script}; console.log(JSON.stringify(csvOf({json.dumps(rows)})))"
    output = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout
    expected = [[f"'{text}" if text in RUN else text, str(n), "-0.5", ""] for n, (text, *_) in enumerate(rows)]
    assert list(csv.reader(io.StringIO(json.loads(output), newline=""))) == expected


def test_a_large_file_is_read(tmp_path):
    (tmp_path / "large.csv").write_text("run,value\n" + f"{'r' * 2**20},0.5\n" * 65)
    assert read_csv(tmp_path / "large.csv")["value"].to_list() == [0.5] * 65


@pytest.mark.parametrize("name", ["=1+1", "@x", "-x", "'x", "+1+1"])
def test_runs_from_untrusted_sources(tmp_path, name, capsys):
    half = {("k", 1): (50, 100)}
    write_run(
        tmp_path / "runs" / name, arch=name, task={"name": name}, evals=[evaluation(50, half, measures={"kl": -0.5})]
    )
    out = tmp_path / "found.csv"
    assert main(["results", str(tmp_path / "runs" / name), "source=yours", "--csv", str(out)]) == 0
    cells = [cell for row in csv.reader(out.open(newline="")) for cell in row]
    assert all(map(safe, cells))
    assert "-0.5" in cells
    numbers = read_csv(out)
    assert set(numbers["model"]) == set(numbers["task"]) == {name}
    assert -0.5 in numbers["value"].to_list()
    assert numbers.schema["value"] == pl.Float64
    result = list(csv.reader(io.StringIO(numbers_csv(load_play(tmp_path / "runs" / name)))))
    assert all(safe(cell) for row in result for cell in row)
    assert result[1][1] == "'" + name

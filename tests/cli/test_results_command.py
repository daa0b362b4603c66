"""`canonlm results`: tables, files and pairs of the published numbers, with the user's beside them."""

import csv
import io
import json
import re

import polars as pl
import pytest
from folders import evaluation, text_evaluation, write_results, write_run, write_text_run

from canonlm.cli import main
from canonlm.experiments.published import everything, published
from canonlm.report.results_payload import beside_the_published
from canonlm.runs.gather import gather
from canonlm.runs.table import RESULTS, SCHEMA, choose, paired

TASK = {"name": "depo", "N": 8, "K": 2, "M": 10, "name_vocab": 8, "min_name_len": 1, "max_name_len": 1}
SIZES = {"model": {"num_hidden_layers": 2, "hidden_size": 64}, "data": {"seq_len": 64}}


def run_folder(folder, arch="llama", correct=75, finished=True):
    """A run on a task of two slices."""
    row = evaluation(10, {("k", k): (correct, 100) for k in (1, 2)})
    return write_run(folder, arch=arch, task=TASK, evals=[row], finished=finished, config=SIZES)


def evaluated(folder, source="some/model"):
    folder.mkdir(parents=True)
    score = {"measure": "exact", "value": 0.912, "stderr": 0.0127, "n": 500, "slice": {}, "share": True,
             "higher_is_better": True}  # fmt: skip
    entry = {"suite": "multihop", "name": "1hop-2k", "settings": {"published": True}, "scores": [score]}
    (folder / "results.json").write_text(json.dumps({"model": {"source": source}, "results": [entry]}))


def cells(text):
    """The lines of a table, split at runs of spaces."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_short_table_of_all_64(capsys):
    assert main(["results"]) == 0
    heading, header, *rows = cells(capsys.readouterr().out)
    assert heading[0].startswith("short (percent")
    assert header == ["model", "lm_eval_avg13", "LMB", "Hella", "ARC-c", "MMLU", "Wiki_ppl", "JRT_avg12", "1hop-4k",
                      "2hop-0k", "babilong_avg20"]  # fmt: skip
    assert len(rows) == 64
    assert rows[0] == ["Llama-1B-Nemo-1T-lr0.002", "57.2", "57.5", "68.2", "46.0", "44.0", "13.73", "56.1", "28.8",
                       "33.2", "34.1"]  # fmt: skip


def test_a_filter_may_be_long(capsys):
    assert main(["results", "model=" + ",".join(["Llama-1B-Nemo-1T-lr0.002"] * 20)]) == 0
    assert "57.2" in capsys.readouterr().out


def test_filters_ignore_case(capsys):
    assert main(["results", "arch=gla5", "size=1B"]) == 0
    names = [row[0] for row in cells(capsys.readouterr().out)[2:]]
    assert names == [f"GLA5{kind}-1B-Nemo-1T-lr{lr}" for kind in ("conv", "Canon") for lr in (0.002, 0.003, 0.005)]


@pytest.mark.parametrize(("group", "columns"), [("standard", 14), ("perplexity", 2), ("retrieval", 13),
                                                ("multihop", 16), ("babilong", 21), ("needle", 21)])  # fmt: skip
def test_groups_show_every_number(group, columns, capsys):
    assert main(["results", "--group", group, "model=GDN2Canon-3B-Nemo-1T-lr0.003"]) == 0
    rows = [row for row in cells(capsys.readouterr().out) if row[0].startswith("GDN2")]
    assert sum(len(row) - 1 for row in rows) == columns  # in several tables, by width


def test_other_sources(capsys):
    assert main(["results", "source=reference", "--group", "standard"]) == 0
    assert len(cells(capsys.readouterr().out)) == 2 + 18
    assert main(["results", "source=best"]) == 0
    assert len(cells(capsys.readouterr().out)) == 2 + 26
    assert main(["results", "model=Qwen/Qwen2-7B"]) == 0  # it matches nothing else
    assert "Qwen/Qwen2-7B" in capsys.readouterr().out
    assert main(["results", "--group", "mano", "arch=GLA", "size=8L512D"]) == 0
    out = capsys.readouterr().out
    assert "mano-10 l=10" in out
    assert len(re.findall("^GLA ", out, re.MULTILINE)) == 3  # each variant
    assert main(["results", "source=reference", "arch=GLA5"]) == 0
    assert capsys.readouterr().out == "nothing: no results are left\n"


def test_csv_is_the_frame_again(capsys, tmp_path):
    assert main(["results", "--csv", "-"]) == 0
    text = capsys.readouterr().out
    types = {name: SCHEMA[name] for name in RESULTS}
    read = pl.read_csv(io.StringIO(text), schema=types)
    assert read.with_columns(pl.col("unit").fill_null("")).equals(everything())
    assert main(["results", "--csv", str(tmp_path / "x.csv"), "arch=GLA5", "--group", "needle"]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'x.csv'}\n"
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (16 + 6) * 21
    assert {row["task"] for row in rows} == {"niah_single_1", "niah_single_2", "niah_single_3"}


def test_json_is_the_frame_again(capsys):
    assert main(["results", "--json", "-", "source=published"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert pl.DataFrame(rows, schema=published().schema).equals(published())


def test_curves(capsys):
    assert main(["results", "--curves", "--csv", "-", "arch=Llama", "size=1B", "task=mmlu"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 8 * 40
    assert (rows[0]["tokens"], rows[0]["unit"], rows[0]["metric"]) == ("33550000000", "%", "acc")


def test_pairs(capsys):
    assert main(["results", "--paired"]) == 0
    out = capsys.readouterr().out
    heading, header, *rows = cells(out)
    assert heading[0].startswith("published: with Canon layers, minus without")
    assert header[:5] == ["arch", "size", "tokens", "lr", "canon"]
    assert len([row for row in rows if "→" in "".join(row)]) == 32
    (gla5,) = [row for row in rows if row[:4] == ["GLA5", "1B", "1T", "0.005"]]
    assert gla5[4:] == ["b → AbCD", "+3.0", "+2.5", "+2.2", "−0.6", "+6.7", "−0.66", "+1.2", "+9.9", "−1.3", "+3.5"]
    better = dict(zip(header[5:], next(row for row in rows if row[0] == "better")[1:], strict=True))
    worse = dict(zip(header[5:], next(row for row in rows if row[0] == "worse")[1:], strict=True))
    assert (better["Wiki_ppl"], worse["Wiki_ppl"]) == ("32/32", "0/32")  # lower is better
    assert better["lm_eval_avg13"] == "28/32"
    marked = {row[0] for row in rows if row[0][-1] in "¹²"}
    assert marked == {"Llama¹", "GLA5²"}
    notes = " ".join(out.split())
    assert "¹ Not Canon alone: in these LlamaCanon models rotary embedding turns a quarter of the dimensions" in notes
    assert "² Not Canon alone" in notes
    assert "contexts of 16384 (1B), 12288 (3B) and 4096 (8B)" in notes
    assert "range over 4.3 (LMB), 2.8 (BoolQ)" in notes


def test_notes_only_where_they_matter(capsys):
    assert main(["results", "--paired", "arch=GDN2"]) == 0
    out = capsys.readouterr().out
    assert "¹" not in out
    assert "contexts of" not in out
    assert "One run per learning rate" in out
    assert main(["results", "--paired", "source=best", "arch=Llama,GLA5", "size=3B"]) == 0
    rows = cells(capsys.readouterr().out)
    assert [row[:4] for row in rows[2:4]] == [["Llama¹", "3B", "1T", "best"], ["GLA5²", "3B", "1T", "best"]]
    assert main(["results", "--paired", "canon=no"]) == 0
    assert capsys.readouterr().out.startswith("nothing: no results are left, or no two that differ in Canon alone")


def test_pairs_as_csv(capsys):
    assert main(["results", "--paired", "--csv", "-", "source=published"]) == 0
    read = pl.read_csv(io.StringIO(capsys.readouterr().out), infer_schema_length=None)
    expected = paired(choose(everything(), ["source=published"]))
    assert read["delta"].equals(expected["delta"])
    assert read["canon_model"].equals(expected["canon_model"])


def test_your_runs_beside_the_published_ones(tmp_path, capsys):
    run = run_folder(tmp_path / "runs" / "mine", correct=75)
    evaluated(run / "evals" / "step-00000010")
    assert main(["results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    multihop, _, depo = out.partition("depo: N=8, K=2, M=10")
    rows = cells(multihop)
    assert rows[0][0].startswith("multihop")
    assert rows[1] == ["model", "size", "1hop-2k"]
    assert len(rows) == 2 + 64 + 1
    assert rows[-1] == ["mine/step-00000010", "–", "91.2 ±1.3"]  # the user's come last
    assert rows[-2][0].endswith("lr0.005") or rows[-2][0].endswith("lr0.003")
    assert [row[0] for row in cells(depo) if row[0] == "mine"] == ["mine"]
    assert "75.0 ±4.4" in depo


def test_pairs_of_your_runs(tmp_path, capsys):
    run_folder(tmp_path / "runs" / "a", "llama", 50)
    run_folder(tmp_path / "runs" / "b", "llama+canon", 80)
    assert main(["results", str(tmp_path), "--paired", "source=yours"]) == 0
    out = capsys.readouterr().out
    (row,) = [row for row in cells(out) if row[0] == "Llama"]
    assert row == ["Llama", "2L64D", "20K", "0.001", "none → ABCD", "+30.0", "+30.0", "+30.0", "0"]
    assert "Your pairs are equal" in out
    assert "Not Canon alone" not in out
    evaluated(tmp_path / "runs" / "a" / "evals" / "x", str(tmp_path / "runs" / "a"))
    evaluated(tmp_path / "runs" / "b" / "evals" / "x", str(tmp_path / "runs" / "b"))
    assert main(["results", str(tmp_path), "--paired"]) == 0
    rows = cells(capsys.readouterr().out)
    better = [row[1:] for row in rows if row[0] == "better"]
    assert better == [["23/32"], ["0/1"], ["1/1", "1/1", "1/1", "0/1"]]  # pairs are only counted within a source


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([], {"finished", "running"}),
        (["source=yours"], {"finished", "running"}),
        (["arch=Llama", "canon=yes"], {"running"}),
        (["task=depo", "source=yours"], {"finished", "running"}),
        (["model=running"], {"running"}),
        (["arch=GLA5"], set()),
    ],
)
def test_a_filter_of_the_page_keeps_your_unfinished_runs(tmp_path, filters, kept):
    run_folder(tmp_path / "runs" / "finished")
    run_folder(tmp_path / "runs" / "running", "llama+canon", finished=False)
    shown = beside_the_published(gather([tmp_path]), filters)
    assert set(shown.curves.filter(pl.col("source") == "yours")["model"]) == kept
    assert "running" not in shown.numbers["model"]
    assert ("running" in shown.settings) == ("running" in kept)


def test_names_stay_text(tmp_path, capsys):
    folder = "<img src=x onerror=alert(1)>[red]x[link=http:a]b[a\x1b[31mb"
    run_folder(tmp_path / "runs" / folder)
    run_folder(tmp_path / "runs" / f"{folder} running", finished=False)
    assert main(["results", str(tmp_path), "source=yours"]) == 0
    output = capsys.readouterr()
    shown = folder.replace("\x1b", "�")
    assert any(line.startswith(f"{shown} ") for line in output.out.splitlines())
    assert f"{shown} running: left out, unfinished at step 10 of 10" in output.err
    assert "\x1b" not in output.out + output.err


def test_damaged_runs_are_reported_and_the_csv_stays_valid(tmp_path, capsys):
    run_folder(tmp_path / "runs" / "whole")
    (run_folder(tmp_path / "runs" / "broken") / "config.yaml").write_text("{")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "results.json").write_text("{")
    assert main(["results", str(tmp_path), "source=yours", "--csv", "-"]) == 0
    output = capsys.readouterr()
    assert {row["model"] for row in csv.DictReader(io.StringIO(output.out))} == {"whole"}
    assert output.err.splitlines() == [
        "broken: left out, config.yaml is damaged, line 2: not YAML: did not find expected node content",
        "runs/half/results.json: left out, not readable: not JSON (Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1))",
    ]


def test_unreadable_folders(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"model": ')
    assert main(["results", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(
        "canonlm: FOLDER: expected runs, or results of `canonlm eval`, that can be read (results.json"
    )


FILE = {"file": "my.jsonl", "text_key": "text", "n": None, "file_sha256": "166c44fab5d7ccdd"}
HOPS = {"k": 1, "background": 0, "text": None, "n": 500, "seed": 0, "bos": False}


def asked(folder, arch, entries):
    """A run on text, evaluated after its last step. entries: (suite, name, settings, measure, value)."""
    evals = [text_evaluation(10, {"web": (2.0, 1.5, 1000)})]
    run = write_text_run(folder, arch=arch, evals=evals)
    model = {"source": str(run), "kind": "run", "step": 10, "arch": arch}
    scores = [(suite, name, settings, [(measure, value, None, 5, {}, suite == "multihop")])
              for suite, name, settings, measure, value in entries]  # fmt: skip
    write_results(run / "evals" / "step-00000010", model, scores)


def of_contexts(short, long, sha="166c44fab5d7ccdd"):
    """Bits per byte of a file in windows of 8 and of 64 tokens."""
    for context, value in ((8, short), (64, long)):
        yield "text", "text-my", FILE | {"context": context, "file_sha256": sha}, "bits_per_byte", value


def test_pairs_have_the_same_settings(tmp_path, capsys):
    """Two models, each asked in two contexts, are two pairs: 3.5 - 4.0 and 2.75 - 3.0."""
    asked(tmp_path / "runs" / "a", "llama", of_contexts(4.0, 3.0))
    asked(tmp_path / "runs" / "b", "llama+canon", of_contexts(3.5, 2.75))
    assert main(["results", str(tmp_path), "--paired", "--csv", "-", "task=text-my"]) == 0
    pairs = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [(row["setting"], row["base"], row["value"], row["delta"]) for row in pairs] == [
        ("file=my.jsonl 166c44fa, context=8", "4.0", "3.5", "-0.5"),
        ("file=my.jsonl 166c44fa, context=64", "3.0", "2.75", "-0.25"),
    ]
    assert main(["results", str(tmp_path), "--paired", "source=yours", "--group", "text-my"]) == 0
    better = [row[1:] for row in cells(capsys.readouterr().out) if row[0] == "better"]
    assert better == [["1/1"], ["1/1"]]


def test_each_setting_has_a_cell(tmp_path, capsys):
    """Other contexts and another file of the same name; no two rows of the CSV have the same question."""
    other = ("text", "text-my", FILE | {"context": 64, "file_sha256": "142a2dfb15251bde"}, "bits_per_byte", 7.0)
    again = ("text", "text-my", FILE | {"file": "./my.jsonl", "context": 64}, "bits_per_byte", 3.5)
    asked(tmp_path / "runs" / "a", "llama", [*of_contexts(4.0, 3.0), other, again])
    assert main(["results", str(tmp_path), "source=yours", "task=text-my", "--csv", "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["setting"]: row["value"] for row in rows} == {
        "file=my.jsonl 166c44fa, context=8": "4.0",
        "file=my.jsonl 166c44fa, context=64": "3.5",  # the later answer to the same question
        "file=my.jsonl 142a2dfb, context=64": "7.0",
    }
    assert len(rows) == 3
    assert main(["results", str(tmp_path), "source=yours", "--group", "text-my"]) == 0
    shown = cells(capsys.readouterr().out)
    assert sorted(row[-1] for row in shown if row[0].startswith("a/step")) == ["3.5", "4", "7"]


def test_only_the_published_settings_are_beside_the_published_scores(tmp_path, capsys):
    settings = [HOPS | {"people": people, "published": True} for people in (5, 1)]
    values = [("multihop", "1hop-0k", each, "exact", value) for each, value in zip(settings, (0.25, 0.9), strict=True)]
    asked(tmp_path / "runs" / "a", "llama", values)
    assert main(["results", str(tmp_path), "--group", "multihop", "model=a/step-00000010"]) == 0
    _, header, row = cells(capsys.readouterr().out)
    assert dict(zip(header[2:], row[2:], strict=True)) == {"1hop-0k": "25.0", "people=1, published 1hop-0k": "90.0"}

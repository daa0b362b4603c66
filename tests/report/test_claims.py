"""The ledger of claims: from rows of kept runs to verdicts, estimates and pages."""

import csv
import math
import os
import re
from pathlib import Path
from statistics import mean

import pytest
from PIL import Image
from reading import row_heads, visible_text

from canonlm.cli import main
from canonlm.experiments import grid, ledger, schema
from canonlm.experiments.claims import Claim, Estimate, after_all, claims, listed, summary
from canonlm.experiments.retests import RIGHT
from canonlm.experiments.verdicts import FASTER
from canonlm.report.claims_page import MARK, READINGS, html, markdown
from canonlm.runs.rows import MAX_LINE
from canonlm.runs.seed_statistics import LEVEL, gaffke_interval


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Runs of llama and llama+canon on depo-micro: 15 and 75 of 100 questions of each slice, a little more by seed."""
    folder = tmp_path_factory.mktemp("kept")
    fig7 = schema.load("fig7")
    rows = []
    for arch, right in (("llama", 15), ("llama+canon", 75)):
        point = grid.Point("depo-micro", arch, None, None)
        tuning = grid.tuning_runs(fig7, point)
        fresh = [grid.fresh_run(fig7, point, 0.001, seed) for seed in range(7)]
        for run in [*tuning, *fresh]:
            best = run.config.train.optim.lr == 0.001
            correct = right + run.config.train.seed % 5 if best else 10
            base = {
                "run": run.name, "setting": "depo-micro", "arch": arch, "lr": "0.001",
                "machine": "a <b>machine</b>\x1b[31m",
            }  # fmt: skip
            base |= {"seed": "0", "split": "test", "steps": "600", "loss": "1", "commit": "abcdef0123456789"}
            for step, count in ((300, 10), (600, correct)):
                slices = f"k=1 {count}/100; k=2 {count}/100"
                rows.append(dict.fromkeys(ledger.COLUMNS, "") | base | {"step": str(step), "slices": slices})
    with (folder / "depo-micro.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ledger.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def entries(kept):
    """The claims by number."""
    return {each.id: each for each in claims(kept)}


@pytest.fixture(scope="module")
def own():
    """The claims by the package's own runs."""
    return claims(ledger.OWN_RESULTS)


def test_the_docs_say_what_the_kept_runs_say(own):
    root = Path(__file__).parents[2]
    assert (root / "docs/claims.md").read_text() == markdown(own), "canonlm claims --out docs/claims.md"
    for name in ("claims", "claims-phone"):
        assert summary(own) in Image.open(root / f"docs/images/{name}.png").info["page"], "make pictures"


def test_the_intervals_of_the_experiments_page_are_those_of_the_ledger(own):
    """But one of hops, by five older seeds. Where ours are behind, the page has positive numbers."""
    page = (Path(__file__).parents[2] / "docs/experiments/micro-scale.md").read_text()
    text = page[page.index("## Copying at micro scale") : page.index("## The same claims with other seeds")]
    safe = r"safe\s+interval(?: goes)?(?: from)? [-−]?([\d.]+)(?: behind)?\s+to [-−]?(\d+\.\d)"
    shown = {frozenset(ends) for ends in re.findall(rf"{safe}|\(([\d.]+\.\d{{3}}) to [−-]?(\d\.\d{{3}})\)", text)}
    ends = [(abs(each.low), abs(each.high)) for entry in own for each in entry.estimates]
    known = {frozenset({"", *(f"{end:.{digits}f}" for end in of)}) for of in ends for digits in (1, 3)}
    assert len(shown) > 20
    assert shown - known == {frozenset({"", "30.2", "39.8"})}


def test_a_claim_of_which_a_part_fails_is_supported_in_part(entries):
    """GLA5 with Canon layers is as good as GDN2, but not shown to be better than Mamba2."""
    entry = entries["C49"]
    assert (entry.state, [each.state for each in entry.estimates]) == ("supported in part", ["supported", "undecided"])
    assert "(undecided)" in markdown([entry])
    assert "(undecided)" in visible_text(html([entry]))


def test_frozen_canon_layers_are_judged_on_whole_lists(own):
    """They copy at most 2 of 256, with seeds that no earlier run had (C02)."""
    with (ledger.OWN_RESULTS / "copying-atlas.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["arch"] == "llama+canon:frozen" and row["split"] == "test"]
    rows = [row for row in rows if row["step"] == row["steps"] and 200 <= int(row["seed"]) < 207]
    full = [int(re.search(r"first=all (\d+)/256", row["slices"])[1]) for row in rows]
    assert (len(full), max(full)) == (7, 2)
    [entry] = [each for each in own if each.id == "C02"]
    gain, lists = entry.estimates
    assert (entry.state, gain.state, lists.state) == ("contradicted", "undecided", "contradicted")
    assert lists.value == pytest.approx(100 * sum(full) / 256 / 7)
    assert 0 <= lists.low < lists.value < lists.high < 50  # an unseen success of some runs is possible
    assert (lists.low, lists.high) == pytest.approx(
        [100 * end for end in gaffke_interval([each / 256 for each in full], LEVEL / 2)]  # two parts share the level
    )
    assert str(lists).endswith(" % right")
    assert "is not in the registered file" in entry.reason
    assert entry.reason in markdown([entry])


def test_intervals_that_assume_a_distribution_are_marked(own):
    """Those of losses, divergences and published tables are t-intervals."""
    assert {each.unit for entry in own if entry.setting for each in entry.estimates if not each.assumes} == {
        "points", RIGHT, FASTER,
    }  # fmt: skip
    assert all(each.assumes for entry in own if entry.id == "C49" for each in entry.estimates)
    for entry in own:
        for page in (markdown([entry]), visible_text(html([entry]))):
            assert READINGS in page
            assert all((f"{each} {MARK}" in page) == each.assumes for each in entry.estimates)


def test_a_claim_of_which_a_part_is_tested_is_at_most_supported_in_part(own):
    """More than the registered comparisons say: a factor, or other tasks."""
    entries = {each.id: each for each in own}
    for number in ("C06", "C11", "C21", "C25", "C26"):
        entry = entries[number]
        assert (entry.state, {each.state for each in entry.estimates}) == ("supported in part", {"supported"})
    factors = re.compile("times|third|half|40 %|10 to 15 %|one hop to four|99 %")
    in_figures = {number for name in schema.names() for number, each in schema.load(name).claims.items() if each.part}
    with_factor = {number for number, each in listed().items() if factors.search(each.text) and not each.counted}
    tested = {number for name in schema.names() for number in schema.load(name).claims}
    parts = {number for number, each in listed().items() if each.part}
    assert with_factor & tested <= parts | in_figures
    assert not parts & in_figures  # said once


def test_a_test_that_could_hardly_be_passed_decides_nothing(own):
    """C45: 0.05 nats were to be gained, and 0.057 are all that is lost beyond the trained length."""
    [entry] = [each for each in own if each.id == "C45"]
    assert (entry.state, {each.state for each in entry.estimates}) == ("undecided", {"undecided"})
    assert listed()["C45"].undecided["micro"] in entry.reason
    with (ledger.OWN_RESULTS / "text-micro.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["arch"], row["split"]) == ("llama+canon", "test")]
    last = [row["measures"].split("; ") for row in rows if row["step"] == row["steps"]]
    measures = [dict(part.split(" ") for part in each) for each in last]
    lost = mean(float(each["loss_beyond"]) - float(each["loss"]) for each in measures)
    assert f"{lost:.3f}" == "0.057"
    assert "0.057" in entry.reason


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "text"),
    [
        (math.inf, 4, math.inf, FASTER, "more than 4 times as fast"),
        (math.inf, 0, math.inf, FASTER, "any number of times as fast"),
        (0, 0, 0.25, FASTER, "less than 0.25 times as fast"),
        (0, 0, math.inf, FASTER, "any number of times as fast"),
        (0.001, -0.004, 0.2, "points", "0.00 [0.00, +0.20] points"),
    ],
)
def test_the_words_of_an_estimate(value, low, high, unit, text):
    assert str(Estimate("a - b", value, low, high, unit, "undecided")) == text


def test_the_ledger_counts_its_comparisons_together():
    """Five seeds have a p-value of at least 2/252, seven 2/3432; 10 comparisons turn these into 0.08 and 0.006."""

    def entry(number, p, setting="depo-micro"):
        part = Estimate("a - b", 60.0, 10.0, 80.0, "points", "supported", p=p)
        return Claim(number, "", "supported", "", "", (part,), setting=setting)

    assert after_all([]) == ""
    five = [entry(f"C{n}", 2 / 252) for n in range(10)]
    assert after_all(five).startswith("Of 10 comparisons of runs that expect a difference, 0 show one by an exact")
    seven = [entry("C1", 2 / 3432), *(entry(f"C{n}", 0.5, "brevo-micro") for n in range(2, 11))]
    assert "1 shows one by an exact permutation test that counts these 10 (C1)." in after_all(seven)
    assert "brevo-micro decides C2, C3, C4, C5, C6, C7, C8, C9, C10; depo-micro decides C1." in after_all(seven)


def test_the_docs_list_every_experiment():
    text = (Path(__file__).parents[2] / "docs/replicate.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| .* \| (C[C\d, ]+|)\|$", text, re.MULTILINE))
    assert {name: set(re.findall(r"C\d+", claims)) for name, claims in listed.items()} == {
        name: set(schema.load(name).claims) for name in schema.names()
    }


def test_kept_runs_decide_a_claim(entries):
    depth = entries["C06"]
    assert (depth.state, depth.seeds, depth.runs) == ("supported in part", 7, (44, 44))
    [estimate] = depth.estimates
    assert estimate.value == pytest.approx(60)
    assert 10 < estimate.low < 20 < estimate.high < 80  # ten points are required
    assert re.fullmatch(r"\[\+5\d\.\d, \+6\d\.\d\]", estimate.interval(estimate.normal))
    assert str(estimate).startswith("+60.0 [+")
    assert (depth.machines, depth.commits) == (("a <b>machine</b>�[31m",), ("abcdef0123456789",))
    assert entries["C10"].state == "untested"
    assert entries["C10"].reason == "no runs yet: canonlm replicate fig7 --scale micro"
    assert entries["C05"].state == "untested"


def test_parameters_are_counted(entries):
    """12 layers of width 768: A and C have 768 channels, B 3 x 768, D 2 x 2048, four taps each."""
    entry = entries["C04"]
    added = 4 * (768 + 3 * 768 + 768 + 2 * 2048)
    layer = 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    assert entry.estimates[0].value == pytest.approx(100 * added / layer)
    assert entry.state == "supported"


def test_published_claims_keep_their_confounder(entries):
    assert entries["C46"].state == "undecided"
    assert "rotary" in entries["C46"].reason


def test_both_pages_have_every_claim_and_escape_markup(entries):
    every = list(entries.values())
    page, text = html(every), markdown(every)
    assert entries.keys() <= set(row_heads(page))
    assert entries.keys() <= set(re.findall(r"^\| (\w+) \|", text, re.MULTILINE))
    assert "a <b>machine" in visible_text(page)
    assert "<b>machine" not in page + text
    assert "\x1b" not in page + text
    assert r"a &lt;b&gt;machine&lt;/b&gt;�\[31m" in text
    assert summary(every) in text
    assert sum(map(int, re.findall(r"\d+", summary(every))[1:])) == len(entries) == len(listed())


def test_the_command(kept, capsys, tmp_path):
    assert main(["claims", "c06", "--runs", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "C06  supported in part" in out
    assert "\x1b" not in out
    assert "llama+canon - llama: +60.0 [" in out
    assert main(["claims", "--runs", str(kept), "--out", str(tmp_path / "claims.md")]) == 0
    assert (tmp_path / "claims.md").read_text().startswith("# What the paper claims")


GOOD = "run,depo-micro,llama,2L128D,,0.001,0,test,600,600,k=1 3/4; k=2 2/4,kl 0.5,1.5,60,,abc,a machine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3/4", "9/4", "more right answers than questions, 9/4"),
        ("3/4", "-5/4", 'slices: expected such as k=1 3/4, got "k=1 -5/4"'),
        ("3/4", "5/0", "more right answers than questions, 5/0"),
        ("3/4", "0/0", "slices: expected at least one question"),
        ("3/4", "5", "slices: expected such as"),
        ("3/4", "5/7/9", "slices: expected such as"),
        ("3/4", "1/" + "1" * 400, "expected a count"),
        ("3/4", "1/" + "1" * 5000, "4300 digits"),
        ("k=1 3/4; k=2 2/4,kl 0.5", ",", "expected slices or measures, got neither"),
        ("kl 0.5", "kl nan", 'kl: expected a finite number, got "nan"'),
        ("kl 0.5", "kl 1e999", "kl: expected a finite number"),
        ("kl 0.5", "kl", 'measures: expected a finite number, got "kl"'),
        (",1.5,", ",-inf,", 'loss: expected a finite number, got "-inf"'),
        (",600,600,", ",-600,600,", "expected a count, got -600"),
        (",600,600,", ",,600,", "invalid literal"),
        (",600,600,", ",500,600,", "a finished run has an evaluation after its last step"),
        (",600,600,", ",0,0,", "a finished run has an evaluation after its last step"),
        (",a machine", "", "expected 17 fields, got 16"),
        (",a machine", ",a,b", "expected 17 fields, got 18"),
        ("a machine", '"a machine', "unexpected end of data"),
        ("a machine", "a" * (MAX_LINE + 1), "field larger than field limit"),
        ("a machine", f"a machine\n{GOOD.replace('3/4', '4/4')}", "another row of run has other numbers for step 600"),
        ("a machine", f"a machine\n{GOOD.replace('600,600', '300,700')}", "another row of run has 600 steps"),
    ],
)
def test_a_kept_row_that_no_run_wrote_is_named(old, new, message, tmp_path):
    path = tmp_path / "depo-micro.csv"
    assert old in GOOD
    path.write_text(f"{','.join(ledger.COLUMNS)}\n{GOOD}\n{GOOD.replace('600,600', '300,600')}\n")
    [outcome] = ledger.read(tmp_path).values()  # as it is, it can be read
    assert outcome.final.accuracy == (3 / 4 + 2 / 4) / 2
    path.write_text(f"{','.join(ledger.COLUMNS)}\n{GOOD.replace(old, new)}\n")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ledger.read(tmp_path)
    assert re.match(rf"{re.escape(str(path))}, line [23]: ", str(error.value))


def test_a_large_kept_file_is_read(tmp_path):
    rows = (GOOD.replace("run", f"run{n}", 1).replace("a machine", "m" * (MAX_LINE - 1)) for n in range(65))
    (tmp_path / "depo-micro.csv").write_text("\n".join([",".join(ledger.COLUMNS), *rows]))
    assert len(ledger.read(tmp_path)) == 65


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "columns", "latin-1", "broken link"])
def test_a_kept_file_that_is_none_is_named(kind, tmp_path, capsys):
    path = tmp_path / "depo-micro.csv"
    make = {
        "fifo": lambda: os.mkfifo(path), "folder": path.mkdir, "device": lambda: path.symlink_to("/dev/zero"),
        "columns": lambda: path.write_text("a,b\n"), "latin-1": lambda: path.write_bytes(b"\xff"),
        "broken link": lambda: path.symlink_to("nowhere"),
    }  # fmt: skip
    make[kind]()
    for command in (["claims", "--runs"], ["replicate", "fig7", "--dry-run", "--export"]):
        assert main([*command, str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(f"canonlm: {path}")


def test_a_kept_run_without_a_slice_of_the_claim_is_named(kept, tmp_path):
    text = (kept / "depo-micro.csv").read_text()
    (tmp_path / "depo-micro.csv").write_text(re.sub(r"k=1 \d+/100; ", "", text))
    with pytest.raises(ValueError, match=r"line \d+: expected answers on the slice k=1 at step \d+, got k=2"):
        claims(tmp_path)


@pytest.mark.parametrize("content", ["[1]", '{"experiments": [1]}', '{"experiments": {"a": 1}}', "5"])
def test_a_note_that_is_none_is_named(content, tmp_path):
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(ValueError, match=r"experiment\.json: expected experiments and their sha256, got"):
        ledger.note(tmp_path, {"fig7-micro": "abc"}, "")

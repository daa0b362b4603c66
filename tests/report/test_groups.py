"""One page for several plays into one folder: repeats are pooled, and other runs are separate, named by difference."""

import json

import pytest
from folders import evaluation, write_run, write_text_run
from folders import text_evaluation as text_row
from reading import page_of, row_heads, visible_text

from canonlm.report import load_play, read_runs, summarise
from canonlm.report.settings import settings
from canonlm.report.table import tables
from canonlm.runs.groups import by_run, grouped

SIZES = [(2, 64), (2, 128), (4, 128), (4, 256)]


def run(folder, arch="llama", seed=0, share=50, params=1_000_000, layers=4, width=128, steps=100, **model):
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 2, **model}
    train = {"steps": steps, "batch_size": 32, "seed": seed, "optim": {"lr": 0.001}}
    return write_run(folder, arch=arch, seed=seed, steps=steps, params=params, config={"model": sizes, "train": train},
                     evals=[evaluation(steps, {("k", 1): (share, 100), ("k", 2): (share // 2, 100)})])  # fmt: skip


def of_size(layers, width, **model):
    return {"layers": layers, "width": width, "params": layers * width**2, **model}


def matched(width):
    return {"fields": {"intermediate_size": 3 * width}, "matched": {"intermediate_size": [width, 3 * width]}}


FIELDS = [{}, {"canon_kernel": 3}, {"canon_kernel": 5}, {"canon_kernel": 5, "z_loss": "x"}]
NO_RESIDUAL = {"canon_residual": False}
LLAMAS = [f"llama ({layers}L {width}d)" for layers, width in SIZES]


@pytest.mark.parametrize(
    ("runs", "expected", "families"),
    [
        ([{"fields": fields} for fields in FIELDS] + [{"fields": {}, "steps": 200}],
         ["llama (steps=100)", "llama (canon_kernel=3, steps=100)", "llama (canon_kernel=5, steps=100)",
          "llama (canon_kernel=5, z_loss=x, steps=100)", "llama (steps=200)"], 5),
        ([{"steps": 100}, {"arch": "gdn2", "steps": 200}], ["llama", "gdn2"], 2),
        ([of_size(*size, seed=seed) for size in reversed(SIZES) for seed in (0, 1)], LLAMAS, 1),
        ([of_size(*size, **matched(size[1])) for size in SIZES], LLAMAS, 1),
        ([{"num_attention_heads": heads, "params": 1_000} for heads in (2, 4)],
         ["llama (num_attention_heads=2)", "llama (num_attention_heads=4)"], 1),
        # They were once pooled as "2 runs".
        ([{"arch": "llama+canon", "fields": fields, "seed": seed} for fields in ({}, NO_RESIDUAL) for seed in (0, 1)],
         ["llama+canon", "llama+canon (canon_residual=false)"], 2),
    ],
    ids=["fields", "not shared", "sizes", "matched sizes", "equal depth and width", "residual"],
)  # fmt: skip
def test_groups_are_named_by_what_differs(tmp_path, runs, expected, families):
    for place, about in enumerate(runs):
        run(tmp_path / str(place), **about)
    archs = summarise(read_runs(sorted(tmp_path.iterdir()))[0])
    assert [a.arch for a in archs] == expected
    assert len({a.family for a in archs}) == families
    assert sum(len(a.best.runs) for a in archs) == len(runs)


def test_outside_files_distinguish_runs(tmp_path):
    for name, sha in (("a", "1" * 64), ("b", "2" * 64), ("c", "2" * 64)):
        folder = run(tmp_path / "runs" / name, "mine.py:Block", seed=int(name, 16))
        (folder / "code.json").write_text(json.dumps({"outside": {"mine.py:Block": sha}}))
    runs, _ = read_runs(sorted((tmp_path / "runs").iterdir()))
    groups = grouped(runs)
    assert [len(one.runs) for one in groups] == [1, 2]
    assert all(one.name.startswith("mine.py:Block (mine.py:Block=") for one in groups)


def test_two_plays_one_page(tmp_path, capsys):
    """The page has different architectures, residual and no residual, four sizes, and matched parameters."""
    listed = [f"llama{place}" for place in range(len(SIZES))]
    for name, size in zip(listed, SIZES, strict=True):
        run(tmp_path / "runs" / name, **of_size(*size), share=20)
    for arch, fields in (("gdn2", {}), ("llama+canon", {}), ("llama+canon", NO_RESIDUAL)):
        listed.append(f"{arch}{len(fields)}")
        matched = {"intermediate_size": [341, 352]} if arch == "gdn2" else {}
        run(tmp_path / "runs" / listed[-1], arch, params=66_000, layers=4, share=90, fields=fields, matched=matched)
    section = {"id": "tiny/depo", "heading": "depo", "runs": listed, "command": "canonlm play a\ncanonlm play b"}
    (tmp_path / "play.json").write_text(json.dumps({"sections": [section], "command": section["command"]}))
    page = page_of(tmp_path)
    assert all(name in page for name in listed)
    shown = {*LLAMAS, "gdn2", "llama+canon", "llama+canon (canon_residual=false)",
             "llama+canon (canon_residual=false) − llama (4L 128d)"}  # fmt: skip
    assert shown <= set(row_heads(page))
    assert "Adjusted by --match: gdn2 intermediate_size 341 → 352." in visible_text(page)
    assert "66 k" in visible_text(page)
    assert "canonlm play a\ncanonlm play b" in visible_text(page)
    text = [part.caption or "" for part in tables(load_play(tmp_path)) if hasattr(part, "caption")]
    assert any("gdn2 intermediate_size 341 → 352" in caption for caption in text)


def test_settings_have_a_column_per_group(tmp_path):
    for residual in (True, False):
        run(tmp_path / "runs" / str(residual), "llama+canon", fields={"canon_residual": residual})
    runs, _ = read_runs(sorted((tmp_path / "runs").iterdir()))
    columns, _, differing = settings(grouped(runs))
    assert len(columns) == 2
    assert [(one.key, one.values) for one in differing] == [("model.fields.canon_residual", ("no", "yes"))]


@pytest.mark.parametrize("decay", [0.1, 0.3])
def test_runs_on_text_name_their_differences(tmp_path, decay):
    for name, value in (("a", 0.1), ("b", decay)):
        train = {"steps": 10, "batch_size": 2, "seed": 0, "optim": {"lr": 0.001, "weight_decay": value}}
        write_text_run(tmp_path / name, evals=[text_row(10, {"web": (2.0, 0.5, 10)})],
                       config={"train": train}, contents={"web": "a" * 64})  # fmt: skip
    runs, _ = read_runs([tmp_path / "a", tmp_path / "b"])
    expected = ["llama", "llama"] if decay == 0.1 else ["llama (weight_decay=0.1)", "llama (weight_decay=0.3)"]
    assert [by_run(grouped(runs))[run.name].family for run in runs] == expected
    assert expected[1] in page_of(tmp_path)

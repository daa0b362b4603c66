"""The identity of a run by its configuration, runs that repeat each other, and the names of their folders."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from canonlm.core.files import Stamp
from canonlm.runs import folder
from canonlm.runs.identity import (
    MAX_NAME,
    changes,
    differences,
    flat,
    group,
    identity,
    run_name,
    settings,
    slug,
    what_differs,
    within_limit,
)
from canonlm.runs.load import load_run

CONFIG = {
    "preset": "tiny",
    "arch": "llama+canon",
    "task": {"name": "depo", "N": 30},
    "model": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 2, "fields": {}},
    "data": {"seq_len": 512, "workers": 1},
    "train": {"steps": 600, "seed": 0, "log_every": 10, "optim": {"lr": 0.001, "schedule": "cosine"}},
    "track": [],
    "parallel": {"tp": 1},
}


def with_(**changed):
    config = copy.deepcopy(CONFIG)
    for key, value in changed.items():
        *parents, last = key.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    return config


def test_an_identity_is_short_and_does_not_depend_on_order_or_on_what_is_not_set():
    assert re.fullmatch("[0-9a-f]{12}", identity(CONFIG))
    assert identity(dict(reversed(CONFIG.items()))) == identity(CONFIG)
    assert identity({**CONFIG, "later": None, "model": {**CONFIG["model"], "matched": {}}}) == identity(CONFIG)


@pytest.mark.parametrize(
    "same",
    [{"data__workers": 3}, {"train__log_every": 1}, {"parallel__tp": 2}, {"track": ["wandb"]}, {"profile": "3:4"}],
)
def test_settings_that_resume_may_change_are_not_part_of_it(same):
    assert identity(with_(**same)) == identity(CONFIG)
    assert changes(CONFIG, with_(**same)) == []


@pytest.mark.parametrize(
    "other", [{"train__steps": 601}, {"task__N": 31}, {"model__fields": {"canon_residual": False}}, {"arch": "llama"}]
)
def test_settings_that_decide_the_result_are_part_of_it(other):
    assert identity(with_(**other)) != identity(CONFIG)
    assert group(with_(**other)) != group(CONFIG)
    assert len(changes(CONFIG, with_(**other))) == 1


def test_a_group_leaves_out_rate_and_seed_and_what_rounds():
    for same in ({"train__optim__lr": 3e-3}, {"train__seed": 7}, {"preset": None}, {"train__device": "cuda"}):
        assert identity(with_(**same)) != identity(CONFIG)
        assert group(with_(**same)) == group(CONFIG)


def test_files_from_outside_are_part_of_it():
    ones = [identity(CONFIG, {"mine.py:Block": sha}) for sha in ("a", "b")]
    assert len({identity(CONFIG), *ones}) == 3
    assert identity({**CONFIG, "outside": {"mine.py:Block": "a"}}) == ones[0]
    assert identity(CONFIG, {}) == identity(CONFIG)


def test_text_may_be_moved():
    there, first = (with_(task=None, text={"sources": {"web": {"path": path, "weight": 1.0}}}) for path in "ab")
    assert [key for key, _, _ in differences(there, first)] == ["text.sources.web.path"]
    assert changes(there, first) == []
    assert identity(there) == identity(first)


def test_a_run_at_a_constant_rate_can_be_extended():
    constant = with_(train__optim__schedule="constant")
    longer = copy.deepcopy(constant)
    longer["train"]["steps"] = 900
    assert changes(constant, longer) == []
    assert changes(longer, constant) == [("train.steps", 900, 600)]


def test_what_differs_names_only_differences():
    ones = [{"train.steps": 100, "a.x": 1}, {"train.steps": 200, "a.x": 1}, {"train.steps": 100, "a.x": 1, "b": False}]
    assert what_differs(ones) == ["steps=100", "steps=200", "b=false, steps=100"]
    assert what_differs([{"a.lr": 1}, {"b.lr": 1}]) == ["a.lr=1", "b.lr=1"]
    long = what_differs([{f"key{i}": j for i in range(20)} for j in (1, 2)])
    assert all(len(text) <= 60 for text in long)
    assert len({*long}) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_untrusted_configurations_have_a_group(config):
    assert group(config) == group(copy.deepcopy(config))
    what_differs([settings(config), {}])


def test_deep_nesting_is_handled():
    deep = {}
    for _ in range(10_000):
        deep = {"a": deep}
    assert len(flat(deep)) == 1


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama+canon=A", "gla5-conv+canon", "llama+rope=0.5x0.5", "depo1-225"])
def test_safe_names_stay(name):
    assert slug(name) == name


STRANGE = [
    *("hf:qwen3{num_key_value_heads=2}", "mine.py:MyBlock", "lib/mine.py:Block", "lib-mine.py:Block", "C:\\x", "é"),
    *("llama+canon=ABCD:nores", "a" * 300, "a" * 301, "../../x", "..", "", "/", "a b", "nul\0", ".hidden"),
]


def test_strange_names_become_safe_and_stay_different():
    slugs = [slug(name) for name in STRANGE]
    assert len({*slugs}) == len(STRANGE)
    assert all(re.fullmatch(r"[A-Za-z0-9_+=-][A-Za-z0-9._+=-]{0,110}", text) for text in slugs)
    assert slug("hf:qwen3{num_key_value_heads=2}").startswith("hf-qwen3-num_key_value_heads=2-")


@given(st.text())
def test_any_text_gives_a_valid_folder_name(text):
    assert re.fullmatch(r"[A-Za-z0-9._+=-]{1,110}", slug(text))
    assert slug(text) not in (".", "..")
    assert slug(text) == slug(slug(text))


def test_names_state_the_differences_from_the_preset():
    def name(**changed):
        return run_name("depo", with_(**changed), CONFIG)

    assert name() == "depo-llama+canon-lr0.001-seed0"
    assert name(model__hidden_size=256) == "depo-llama+canon-4L256d-lr0.001-seed0"
    assert name(model__num_attention_heads=4) == "depo-llama+canon-4L128d4h-lr0.001-seed0"
    assert name(train__steps=200) == "depo-llama+canon-steps200-lr0.001-seed0"
    assert name(model__fields={"canon_residual": False}) == "depo-llama+canon-canon_residual=false-lr0.001-seed0"
    assert name(train__log_every=1) == name()
    many = name(model__fields={"a": 1, "b": [1, 2], "c": "x" * 90}, train__steps=200)
    assert re.fullmatch(r"depo-llama\+canon-[0-9a-f]{6}-lr0\.001-seed0", many)
    assert many != name(model__fields={"a": 2, "b": [1, 2], "c": "x" * 90}, train__steps=200)


def test_a_long_name_leaves_room_for_the_files_of_the_queue(tmp_path):
    def name(task="f" * 200, lr=0.0012345678901234, **changed):
        config = with_(arch="gla5." * 60, train__optim={"lr": lr}, train__seed=2**63 - 1, **changed)
        return run_name(task, config, CONFIG, ["task.N"])

    sizes = {"model__num_hidden_layers": 48, "model__hidden_size": 2048, "model__num_attention_heads": 32}
    others = [name("f" * 199), name(lr=0.0012), name(**sizes, task__N=7), name(**sizes, task__K=2)]
    names = [name(), name(**sizes), name(**sizes, task__N=8), *others]
    assert len({*names}) == len(names)
    assert len(name(**sizes, task__N=8)) == MAX_NAME
    assert all(each.endswith(f"-seed{2**63 - 1}") for each in names)
    for each in names:
        (tmp_path / f"{each}.failures.json").touch()


@given(st.integers(0, 40), st.sampled_from(["-lr0.001-seed0", "-lr1.2345678901234567e-05-seed9223372036854775807"]))
def test_only_names_that_are_too_long_are_cut(more, end):
    begin = "x" * (MAX_NAME - 20 - len(end) + more)
    cut = within_limit(begin, end)
    assert (cut == begin + end) == (more <= 20)
    assert len(cut) == min(len(begin + end), MAX_NAME)
    assert within_limit(begin + "y", end) != within_limit(begin + "z", end)


# -- files from outside -----------------------------------------------------------------------------------------------


def outside(file):
    return SimpleNamespace(object=type, file=file, sha256=Stamp.of(file).sha256)


def load(path):
    return yaml.safe_load(path.read_text())


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "lib").mkdir()
    for name in ("mine.py", "lib/mine.py"):
        (tmp_path / name).write_text(f"NAME = {name!r}\n")
    return tmp_path


def test_copies_and_hashes_are_kept_and_the_same_files_resume(mine):
    ones = {"mine.py:A": outside(mine / "mine.py"), "mine.py:B": outside(mine / "mine.py"),
            "lib/mine.py:A": outside(mine / "lib" / "mine.py")}  # fmt: skip
    run = mine / "run"
    for _ in range(2):
        folder.create(run, CONFIG, load, ones)
    assert json.loads((run / "code.json").read_text())["outside"] == {key: one.sha256 for key, one in ones.items()}
    copies = {path.read_text() for path in (run / "code").iterdir()}
    assert copies == {"NAME = 'mine.py'\n", "NAME = 'lib/mine.py'\n"}
    assert len(list((run / "code").iterdir())) == 2
    assert load_run(run).config["outside"] == {key: one.sha256 for key, one in ones.items()}


def test_another_file_is_refused_in_a_line_with_both_hashes(mine):
    file, run = mine / "mine.py", mine / "run"
    before = outside(file)
    folder.create(run, CONFIG, load, {"mine.py:A": before})
    file.write_text("NAME = 'edited'\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="expected the file that the run in") as error:
        folder.check(run, CONFIG, load, {"mine.py:A": outside(file)})
    text = str(error.value)
    assert text.startswith(f"{file}: ")
    assert before.sha256 in text
    assert outside(file).sha256 in text
    assert "\n" not in text
    with pytest.raises(ValueError, match="does not change while it is used"):
        folder.create(mine / "new", CONFIG, load, {"mine.py:A": before})
    (run / "code.json").write_text("{")
    with pytest.raises(ValueError, match=r"whose code\.json is not damaged"):
        folder.check(run, CONFIG, load, {"mine.py:A": before})


@pytest.mark.parametrize("trained", ["metrics.jsonl", "checkpoints/step-5", "result.json"])
def test_a_file_that_is_corrected_before_anything_was_trained_keeps_the_folder(mine, trained):
    def strict(path):  # as the loader of recipes, which runs only the file that a run began with
        raise ValueError("another file")

    file, run = mine / "mine.py", mine / "run"
    before = CONFIG | {"pair": (1, 2)}  # config.yaml has a list
    folder.create(run, before, load, {"mine.py:A": outside(file)})
    (run / "checkpoints").mkdir()
    (run / "metrics.jsonl").write_text("")
    file.write_text("NAME = 'corrected'\n")
    folder.create(run, before, strict, {"mine.py:A": outside(file)})
    assert [copy.read_text() for copy in (run / "code").iterdir()] == [file.read_text()]
    assert folder.noted_digests(run, []) == {"mine.py:A": outside(file).sha256}
    with pytest.raises(ValueError, match=r"arch: expected .*choose another --out"):
        folder.check(run, CONFIG | {"arch": "other"}, strict, {"mine.py:A": outside(mine / "lib" / "mine.py")})

    (run / trained).write_text('{"step": 1}\n')
    file.write_text("NAME = 'edited'\n")
    with pytest.raises(ValueError, match="another file"):
        folder.check(run, before, strict, {"mine.py:A": outside(file)})

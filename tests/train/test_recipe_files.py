"""Files with bases: the configuration they stand for, the places of mistakes, and how plain values are read."""

import math
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm.core.errors import InvalidSetting
from canonlm.train.build import check
from canonlm.train.load_config import load, merge, override, read_yaml

GROUND = """\
arch: llama
task: {name: copying, N: 8}
model: {num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {seq_len: 18, loss_on: answer}
train:
  batch_size: 4
  eval_every: 8
  eval_size: 8
  checkpoint_every: 10
  optim:
    lr: 3e-3
    eps: 1e-8
"""
MIDDLE = """\
# between
base: ../ground.yaml
train:
  steps: 40
  optim: {lr: 1e-3}
"""
TOP = """\
base: bases/middle.yaml
arch: llama+canon
train:
  batch_size: 8
"""
WSD = TOP + "  optim: {schedule: wsd, decay_steps: 30, warmup_steps: 5}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bases").mkdir()

    def change(ground=GROUND, middle=MIDDLE, top=TOP):
        for name, text in (("ground", ground), ("bases/middle", middle), ("top", top)):
            (tmp_path / f"{name}.yaml").write_text(text)
        return "top.yaml"

    return change


@pytest.mark.parametrize(
    ("texts", "overrides", "message"),
    [
        ({}, ["train.steps=x"], 'train.steps: expected an integer > 0, got "x"'),
        ({}, ["train={steps: x}"], 'train.steps: expected an integer > 0, got "x"'),
        ({"ground": GROUND.replace("1e-8", "tiny")}, [],
         'train.optim.eps: expected a number > 0, got "tiny"  (in bases/../ground.yaml, line 12)'),
        ({"middle": MIDDLE.replace("1e-3", "fast")}, [],
         'train.optim.lr: expected a number > 0, got "fast"  (in bases/middle.yaml, line 5)'),
        ({"top": TOP.replace("8", "0")}, [],
         "train.batch_size: expected an integer > 0, got 0  (in top.yaml, line 4)"),
        ({"top": TOP + "  optim: 3\n"}, [],
         "train.optim: expected a group of settings, got 3  (in top.yaml, line 5)"),
        # A missing key is reported where its group was last written.
        ({"middle": MIDDLE.replace("  steps: 40\n", "")}, [],
         "train.steps: missing; expected an integer > 0  (in top.yaml, line 3)"),
        ({"ground": GROUND.replace("arch: llama\n", ""), "top": TOP.replace("arch: llama+canon\n", "")}, [],
         "arch: missing; expected a string  (in top.yaml, line 1)"),
        ({"ground": GROUND + "  smell: 1\n"}, [],
         'unknown setting "train.smell".…  (in bases/../ground.yaml, line 13)'),
        ({"top": WSD.replace("30", "60")}, ["train.batch_size=2", "task.N=4"],
         "train.optim.decay_steps: expected at most … = 35, got 60  (in top.yaml, line 5)"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_line(write, texts, overrides, message):
    with pytest.raises(InvalidSetting) as caught:
        load(write(**texts), overrides)
    assert re.fullmatch(re.escape(message).replace("…", ".*"), str(caught.value))


@pytest.mark.parametrize(
    ("top", "overrides", "message"),
    [
        (WSD, ["train.steps=20"],
         "train.optim.decay_steps: expected at most train.steps - train.optim.warmup_steps = 15, got 30"),
        (TOP, ["arch=llama", "train.optim.schedule=wsd"],
         "train.optim.decay_steps: missing; expected an integer > 0 with schedule wsd"),
        (TOP, ["task.N=64"], "data.seq_len: expected at least 130, for the test samples of copying(N=64, min_items=16, "
         "max_items=None, test_lengths=None), got 18"),
        (TOP, ["task.difficulty=copying-9"], 'unknown copying difficulty "copying-9". Did you mean "copying-32"? '
         "Copying difficulties: copying-32, copying-500."),
        (TOP, ["text={sources: {a: {path: x}}}"],
         "expected either task (a playground task) or text (token shards), got both"),
        (TOP + "profile: 39:41\n", ["train.steps=39"], 'profile: expected steps up to train.steps = 39, got "39:41"'),
        (TOP, ["model.hidden_size=15"],
         "model.num_attention_heads: expected a divisor of model.hidden_size = 15, got 2"),
    ],
)  # fmt: skip
def test_a_mistake_involving_an_override_is_not_blamed_on_the_file(write, top, overrides, message):
    load(write(top=top), check=check)  # without it, nothing is wrong
    with pytest.raises(InvalidSetting) as caught:
        load("top.yaml", overrides, check)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"top": TOP.replace("bases/", "")},
         'base: expected the path of a YAML file, relative to this one, got "middle.yaml"  (in top.yaml, line 1)'),
        ({"middle": MIDDLE.replace("../ground.yaml", "..")},
         'base: expected the path of a YAML file, relative to this one, got ".."  (in bases/middle.yaml, line 2)'),
        ({"top": TOP.replace("bases/middle.yaml", "[a, b]")},
         "base: expected the path of a YAML file, relative to this one, got ['a', 'b']  (in top.yaml, line 1)"),
        ({"top": TOP.replace("bases/middle.yaml", "./top.yaml")},
         'base: expected a file that is not itself based on this one, got "./top.yaml"  (in top.yaml, line 1)'),
        ({"ground": "base: bases/../top.yaml\n" + GROUND},
         'base: expected a file that is not itself based on this one, got "bases/../top.yaml"'
         "  (in bases/../ground.yaml, line 1)"),
        ({"middle": "train: {steps: 1\nbase: x"},
         "bases/middle.yaml, line 2: not YAML: did not find expected ',' or '}'"),
        ({"middle": "- 1"}, "bases/middle.yaml: expected a YAML mapping, got a list"),
        ({"top": ""}, "top.yaml: expected a YAML mapping, got nothing"),
        ({"top": "1: 2"}, "arch: missing; expected a string  (in top.yaml, line 1)"),
        ({"top": "a:\n\t- b"}, "top.yaml, line 2: not YAML: found character that cannot start any token"),
        ({"top": "a: \0"}, "top.yaml: not YAML: unacceptable character #x0000: control characters are not allowed"),
        ({"top": TOP + "train: {seed: 4}\n"}, "top.yaml, line 5: train appears twice (first in line 3)"),
    ],
)  # fmt: skip
def test_invalid_files(write, texts, message):
    with pytest.raises(ValueError) as caught:
        load(write(**texts))
    assert str(caught.value) == message


def test_null_removes_a_group_of_the_base(write):
    swap = "base: ground.yaml\ntask: null\ntext: {sources: {a: {path: x}}}\ndata: {loss_on: all}\ntrain: {steps: 1}\n"
    assert load(write(top=swap)).task is None


VALUES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
GROUPS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(below=GROUPS, between=GROUPS, above=GROUPS)
@settings(max_examples=50)
def test_a_chain_is_a_merge(tmp_path_factory, below, between, above):
    folder = tmp_path_factory.mktemp("chain")
    for name, base, group in (("x", None, below), ("y", "x.yaml", between), ("z", "y.yaml", above)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**group, **({"base": base} if base else {"d": 0})}))
    raw, places = read_yaml(folder / "z.yaml")
    assert raw == merge(merge({**below, "d": 0}, between), above)
    for key, place in places.items():  # the last file that sets it, and the line
        written = [name for name, group in (("x", {**below, "d": 0}), ("y", between), ("z", above)) if _has(group, key)]
        assert place.file.stem == written[-1]
        assert place.file.read_text().splitlines()[place.line - 1].lstrip().startswith(key.rpartition(".")[2] + ":")


def _has(group, key):
    for part in key.split("."):
        if not isinstance(group, dict) or part not in group:
            return False
        group = group[part]
    return True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # In YAML 1.1 these are 613, a number of seconds, 1000, eight, false, true, a date and an error.
        *((text, text) for text in ("10:13", "1:30.5", "1_000", "010", "no", "on", "2024-01-01", "=")),
        *((text, None) for text in ("~", "", "null")),
        ("1e3", 1000.0),
        ("-1.5E-3", -0.0015),
        (".5", 0.5),
        ("7.", 7.0),
        ("-.inf", -math.inf),
        (".NaN", math.nan),
        ("-0", 0),
        ("+12", 12),
        ("0x1F", 31),
        ("True", True),
        ("false", False),
        ("[1, 2e0, a]", [1, 2.0, "a"]),
    ],
)
def test_plain_values(text, value):
    override(raw := {}, [f"a={text}"])
    assert repr(raw) == repr({"a": value})


@given(st.text(max_size=8) | st.sampled_from(["10:13", "no", "010", "1_0", "0x1", ".5", "~", "2024-01-01", "08"]))
def test_strings_written_by_the_library_are_read_as_strings(tmp_path_factory, text):
    """It quotes texts that it would read as other types; it writes the configuration of run folders."""
    path = tmp_path_factory.getbasetemp() / "texts.yaml"
    path.write_text(yaml.safe_dump({"a": text}))
    assert read_yaml(path)[0] == {"a": text}

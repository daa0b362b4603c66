"""Absurd sizes and endless files: a one-line error within seconds, before anything is allocated."""

import json
import os
import resource
import time

import pytest
from abuse.bases import ONE_STEP
from hypothesis import given
from hypothesis import strategies as st

from canonlm.cli import main
from canonlm.core.limits import memory_of, readable
from canonlm.core.safe_yaml import MAX_NODES, parse_yaml
from canonlm.core.untrusted import MAX_DEPTH, check_tokenizer, open_regular, parse_json, path_inside, read_bytes


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(ONE_STEP)
    return tmp_path / "run.yaml"


def refused(capsys, arguments, seconds=10.0, growth=1e9):
    before, start = _peak(), time.process_time()
    assert main(arguments) == 2, arguments
    assert time.process_time() - start < seconds
    assert _peak() - before < growth
    error = capsys.readouterr().err
    assert error.startswith("canonlm: ")
    assert error.count("\n") == 1
    assert len(error) < 2000
    return error


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_hidden_layers=1000000"], "model.num_hidden_layers: expected an integer > 0 and <= 2000"),
        (["model.hidden_size=1000000"], "model: needs at least"),
        ([f"model.hidden_size={2**62}"], "model.hidden_size: expected an integer > 0 and <= 2147483647"),
        (["data.seq_len=1000000000000"], "data.seq_len: expected an integer > 0 and <= 2147483647"),
        (["data.seq_len=2000000000"], "data.seq_len: needs at least"),
        ([f"train.batch_size={2**62}"], "train.batch_size: expected an integer > 0 and <= 2147483647"),
        (["train.batch_size=2000000000"], "train.batch_size: needs at least 576 GB, this machine has"),
        (["model.hidden_size=4096", "train.batch_size=4000000"], "train.batch_size: needs at least 1.2 TB"),
        (
            ["model.hidden_size=4096", "train.batch_size=4000000", "parallel.micro_batch_size=2000000"],
            "parallel.micro_batch_size: needs at least 590 GB",
        ),
        ([f"train.eval_size={10**20}"], "train.eval_size: expected an integer > 0 and <= 2147483647"),
        (["train.eval_size=2000000000"], "train.eval_size: needs at least 1.0 TB, this machine has"),
        ([f"train.steps={10**20}"], "train.steps: expected an integer > 0 and <= 9007199254740992"),
        (["data.workers=100000000"], "data.workers: expected an integer >= 0 and <= 1024"),
        ([f"train.seed={10**30}"], "train.seed: expected an integer >= 0 and <"),
        (["task.N=1000000000000"], "task.N: expected an integer"),
        (["arch=hf:qwen3{num_hidden_layers=1000000}"], "arch: hf:qwen3"),
        (["arch=hf:mixtral{num_local_experts=100000000}"], "model: needs at least"),
        (["arch=hf:qwen3{head_dim=9223372036854775808}"], "arch: hf:qwen3"),
        (["arch=llama{head_dim=9223372036854775808}"], "head_dim: expected at most 2,147,483,647"),
        (["model.fields.mlp=moe", "model.fields.num_experts=10000000"], "model: needs at least"),
        (["model.fields.attention_dropout={}"], "model.fields.attention_dropout: expected a number"),
        (["model.fields.mixers=" + "[attention]" * 1000], "model.fields.mixers: expected a YAML value"),
        ([f"train.steps={'9' * 5000}"], "train.steps: expected a YAML value"),
        (["arch=" + "x" * 100_000], 'unknown architecture "xxxx'),
        (["\x1b[2J=1"], "unknown setting"),
    ],
)
def test_sizes_of_a_recipe(overrides, message, capsys):
    error = refused(capsys, ["train", "run.yaml", *overrides, "--out", "out"])
    assert message in error
    assert "\x1b" not in error
    assert not os.path.exists("out")


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        "- " * 3000,
        "[" * 100_000,
        "\n".join(" " * i + "a:" for i in range(1500)),
        "model: &a {<<: *a}",
        "a: &a [*a]",
        BOMB,
        f"train: {{steps: {'9' * 5000}}}",
        "a: !!python/object/apply:os.system [touch ran]",
        "a: !!int x",
        "a: !!timestamp x",
        "? [a]\n: 1",
        "x: 1\n---\ny: 2",
        "a: [" + "1," * 40_000 + "]",
        pytest.param("a: [" + "1," * 400_000 + "]", marks=pytest.mark.slow),
        "# " + "x" * 2**20,
        "a: 1\na: 2\x00",
        "",
    ],
)
def test_untrusted_yaml(text, recipe, capsys):
    recipe.write_text(text)
    assert "run.yaml" in refused(capsys, ["train", "run.yaml", "--out", "out"])
    assert not os.path.exists("ran")


def test_input_up_to_the_limits_is_accepted():
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f")[0] is not None
    assert len(parse_yaml("[" + "1," * (MAX_NODES - 1) + "]", "f")[0]) == MAX_NODES - 1
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f")
    for reader in (parse_json, lambda text, place: parse_yaml(text, place)[0]):
        deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
        with pytest.raises(ValueError, match=r"^f(, line 1)?: "):
            reader(deep, "f")


texts = st.text(st.characters(max_codepoint=0xD7FF, exclude_categories=["Cc", "Cs"]))
keys = st.text(st.characters(max_codepoint=0xD7FF, exclude_categories=["Cc", "Cs"]), max_size=160)
numbers = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
)


@given(values)
def test_written_files_are_readable(value):
    """JSON is also YAML, except for characters beyond 0xFFFF, which it writes as two halves, and for keys of more than
    1,024 characters, where an escaped one counts as six."""
    text = json.dumps(value)
    assert parse_json(text, "f") == value
    assert parse_yaml(text, "f")[0] == value


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: 2\na: 1", 3), ("train: {steps: 5, lr: 1,\n  steps: 7}", 2), ("- {1: 2, 1: 3}", 1)]
)
def test_a_key_that_is_there_twice(text, line):
    with pytest.raises(ValueError, match=rf"^f, line {line}: (a|steps|1) appears twice \(first in line 1\)$"):
        parse_yaml(text, "f")


def test_a_mapping_may_have_two_merges():
    assert parse_yaml("{<<: {a: 1}, <<: {b: 2}, b: 3}", "f")[0] == {"a": 1, "b": 3}


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    for reader in (parse_json, parse_yaml):
        message = "f"
        try:
            reader(text, "f")
        except ValueError as error:
            message = str(error)
        assert message.startswith("f")
        assert "\n" not in message


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", 3, None, ["x"], "out"])
def test_names_that_leave_a_folder(name, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in" / "loop")
    with pytest.raises(ValueError, match=r"^place: expected .* in "):
        path_inside(tmp_path / "in", name, "place")
    with pytest.raises(ValueError, match=r"^place: "):
        path_inside(tmp_path / "in", "loop", "place")
    assert path_inside(tmp_path / "in", "sub/file", "place") == tmp_path / "in" / "sub" / "file"


def test_reading_is_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_bytes(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(ValueError, match=r"file: expected at most 99 bytes, got 100$"):
        read_bytes(tmp_path / "file", 99)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular("/dev/zero")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_numbers_of_tokens_are_bounded(name, tmp_path):
    settings = {"tokenizer_class": "ByT5Tokenizer", "model_max_length": 10**30, "extra_ids": 10**6}
    (tmp_path / name).write_text(json.dumps(settings))
    check_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(settings | {"extra_ids": 10**9}))
    with pytest.raises(ValueError, match=r": expected at most 1,000,000, got 1000000000$"):
        check_tokenizer(tmp_path)


def test_memory_is_shown_in_readable_units():
    assert [readable(n) for n in (1, 999, 4e12, 24e9, 9.96e9, 1e18, 1e24)] == [
        *("1 bytes", "999 bytes", "4.0 TB", "24 GB", "10.0 GB", "1.0 EB", "1,000,000 EB")
    ]
    assert 2**30 < memory_of() <= 2**62

"""A run's configuration: complete, strict, with the exact places of mistakes."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from canonlm import tasks
from canonlm.core.errors import InvalidSetting
from canonlm.suites.load_model import open_model
from canonlm.tasks.capo.stream import Stream
from canonlm.tasks.capo.tokens import SHIPPED
from canonlm.train.build import check
from canonlm.train.config import changes, differences, resolve
from canonlm.train.load_config import check_folder, create_folder, load, merge

NAMES = f"{', '.join(tasks.names())}, or FILE.py:NAME"
FILE = """\
arch: llama
task:
  name: copying
  N: 8
model: {num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2}
data:
  seq_len: 18
  loss_on: answer
train:
  steps: 40
  batch_size: 4
  eval_every: 8
  eval_size: 8
  checkpoint_every: 10
  optim:
    lr: 3e-3
    betas: [0.9, 0.95]
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(old="", new=""):
        assert old in FILE
        (tmp_path / "run.yaml").write_text(FILE.replace(old, new, 1) if old else FILE)
        return "run.yaml"

    return change


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("lr: 3e-3", "lr: 3e-3x", 16, 'train.optim.lr: expected a number > 0, got "3e-3x"'),
        ("lr: 3e-3", "lr: .inf", 16, "train.optim.lr: expected a number > 0, got inf"),
        ("lr: 3e-3", 'lr: "3"', 16, 'train.optim.lr: expected a number > 0, got "3"'),
        ("steps: 40", "steps: true", 10, "train.steps: expected an integer > 0, got True"),
        ("steps: 40", "", 9, "train.steps: missing; expected an integer > 0"),
        ("0.95", "1.5", 17, "train.optim.betas: expected two numbers >= 0 and < 1, got (0.9, 1.5)"),
        (", 0.95", "", 17, "train.optim.betas: expected a list of 2, got [0.9]"),
        ("[0.9, 0.95]", "0.9", 17, "train.optim.betas: expected a list of 2, got 0.9"),
        ("answer", "answers", 8, "data.loss_on: expected 'answer' or 'all', got \"answers\""),
        ("N: 8", "N: 0", 4, "task.N: expected an integer >= 1, got 0"),
        ("N: 8", "N: 64", 7, "data.seq_len: expected at least 130, for the test samples of copying(N=64, …), got 18"),
        ("  name: copying\n", "", 2, f"task.name: expected one of {NAMES}, got None"),
        ("  name: copying", "  name: [a]", 3, f"task.name: expected one of {NAMES}, got ['a']"),
        ("task:\n  name: copying\n  N: 8", "task: 5", 2,
         "task: expected a group of settings, such as {name: depo}, got 5"),
        ("  N: 8", "  8: 8", 2, "task: expected the name of a setting, got 8"),
        ("_layers: 1", "_layers: 1, fields: 3", 5, "model.fields: expected a group of settings, got 3"),
        ("  steps: 40", "  stepz: 40", 10, 'unknown setting "train.stepz". Did you mean "train.steps"?…'),
        ("  eval_size:", "  eval_windows:", 13,
         'unknown setting "train.eval_windows". Did you mean "train.eval_size"?…'),  # its earlier name
        ("    lr:", "    lrr:", 16, 'unknown setting "train.optim.lrr". Did you mean "train.optim.lr"?…'),
        ("  N: 8", "  NN: 8", 4, 'unknown setting "task.NN". Did you mean "task.N"?…'),
        ("name: copying", "name: copyin", 2, 'unknown task "copyin". Did you mean "copying"?…'),
        ("arch: llama", "arch: lama", 1, 'unknown architecture "lama". Did you mean "llama"?…'),
        ("arch: llama", "arch: llama+rope=0.3", 1, "+rope: expected a share from 0 to 1…"),
        ("arch: llama\n", "", 1, "arch: missing; expected a string"),
        ("heads: 2}", "heads: 3}", 5, "model.num_attention_heads: expected a divisor…"),
        ("heads: 2}", "heads: 2, fields: {qk_norm: 7}}", 5, "model.fields.qk_norm: expected true or false, got 7"),
        ("heads: 2}", "heads: 2, fields: {rope_dim: 7}}", 5, "model.fields.rope_dim: expected an even number…"),
        ("heads: 2}", "heads: 2, fields: {rope_dm: 8}}", 5, 'unknown setting "model.fields.rope_dm". Did you mean…'),
        ("heads: 2}", "heads: 2, fields: {vocab_size: 8}}", 5, 'unknown setting "model.fields.vocab_size".…'),
        ("heads: 2}", "heads: 2, fields: {canon_sets: 8}}", 5, "model.fields.canon_sets: expected a list of strings…"),
        *(("  steps: 40", f"  steps: 40\n  device: {device}", 11,
           f'train.device: expected auto, cpu or a device that torch sees here, got "{device}"')
          for device in ("cuda:99", "meta")),
    ],
)  # fmt: skip
def test_one_line_names_the_key_and_the_position(write, old, new, line, message):
    with pytest.raises(InvalidSetting) as caught:
        load(write(old, new), check=check)
    pattern = re.escape(f"{message}  (in run.yaml, line {line})").replace("…", ".*")
    assert re.fullmatch(pattern, str(caught.value))


def test_the_configuration_in_a_folder_is_the_same(tiny, tmp_path):
    config = tiny(train={"optim": {"eps": 1e-12, "lr": 1 / 3}}, model={"fields": {"rope_theta": 5e5, "mixers": None}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "config.yaml") == config
    assert differences(load(tmp_path / "config.yaml"), config) == []
    assert differences(config, tiny(train={"seed": 3, "optim": {"eps": 1e-12, "lr": 1 / 3}})) == [
        ("model.fields.rope_theta", 5e5, None),
        ("train.seed", 0, 3),
    ]


def test_merge_leaves_its_arguments_alone():
    base = {"a": {"b": 1, "c": 2}}
    assert merge(base, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
    assert base == {"a": {"b": 1, "c": 2}}


def test_the_task_is_written_out_in_full(tiny):
    written = {"name": "copying", "N": 8, "min_items": 2, "max_items": None, "test_lengths": None}
    assert resolve(tiny.raw()).task == written == tiny(task={"difficulty": "copying-32", "N": 8}).task


def test_a_finite_stream_says_how_many_steps_there_are(tiny):
    capo = {"task": {"name": "capo", "N": 30, "exposures": 4}, "data": {"seq_len": 64, "loss_on": "all"}}
    raw = {**tiny.raw(), **capo}
    windows = tasks.get("capo", N=30, exposures=4).training_windows(0, 64)
    max_steps = -(-windows // raw["train"]["batch_size"])
    assert 30 < max_steps < 100
    raw["train"] = {key: value for key, value in raw["train"].items() if key != "steps"}
    run = resolve(raw)
    assert run.train.steps == max_steps
    assert resolve(yaml.safe_load(run.to_yaml())) == run
    assert resolve(merge(raw, {"train": {"seed": 1}})).train.seed == 1
    assert resolve(merge(raw, {"train": {"steps": max_steps}})).train.steps == max_steps
    with pytest.raises(InvalidSetting, match=f"^train.steps: expected at most {max_steps}, the whole training stream"):
        resolve(merge(raw, {"train": {"steps": max_steps + 1}}))
    raw["task"] = {"name": "copying", "N": 8}
    with pytest.raises(InvalidSetting, match=r"^train\.steps: missing; expected an integer > 0$"):
        resolve(raw)


def test_only_the_passes_that_a_run_reads_are_counted(tiny, monkeypatch):
    """To count the biographies of 100 passes over a million people takes 9 s."""
    capo, batch_size = tasks.get("capo", N=31, exposures=100), tiny().train.batch_size
    one_pass = tasks.get("capo", N=31, exposures=1).training_windows(0, 64)
    raw = {**tiny.raw(), "task": {"name": "capo", "N": 31, "exposures": 100}, "data": {"seq_len": 64, "loss_on": "all"}}
    counted, windows_of = [], Stream.windows_of
    monkeypatch.setattr(Stream, "windows_of", lambda self, *key: counted.append(key[2]) or windows_of(self, *key))
    for steps, passes in ((1, 1), (one_pass // batch_size + 2, 2)):
        resolve(merge(raw, {"train": {"steps": steps}}))
        assert counted == [*range(passes)]
        counted.clear()
    capo.dataset("train", 0, 64, one_pass + 1)
    assert counted == [0, 1]


def test_a_run_keeps_the_names_and_the_tokenizer_that_it_began_with(tiny, tmp_path):
    shutil.copytree(SHIPPED.parent / "pools", tmp_path / "pools")
    tokenizer = Path(shutil.copy(SHIPPED, tmp_path))
    task = {"name": "capo", "N": 20, "exposures": 9, "pools": str(tmp_path / "pools"), "tokenizer": str(tokenizer)}
    raw = {**tiny.raw(), "task": task, "data": {"seq_len": 64, "loss_on": "all"}}
    run = resolve(merge(raw, {"train": {"steps": 3}}))
    create_folder(out := tmp_path / "out", run)
    (out / "metrics.jsonl").write_text("{}\n")
    check_folder(out, run)
    assert not (out / "code").exists()  # data may be large
    for file in (tmp_path / "pools" / "city.txt", tokenizer):
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        line = f"^{file}: expected the file that the run in {out} began with, sha256 [0-9a-f]*, got sha256 [0-9a-f]*$"
        with pytest.raises(ValueError, match=line):
            check_folder(out, run)
        with pytest.raises(ValueError, match=line):  # of `canonlm eval` and `generate`
            open_model(str(out))
        file.write_bytes(before)


def test_windows_suit_the_task(tiny):
    lano = tiny.raw(task={"name": "lano", "grammar": "cfg3b"}, data={"seq_len": 140, "loss_on": "all"})
    del lano["task"]["N"], lano["task"]["min_items"]
    assert resolve(lano).data.seq_len == 140
    for data, line in (
        ({"seq_len": 139}, "data.seq_len: expected at least 140, for the test samples of lano"),
        ({"isolate_documents": True}, "data.isolate_documents: expected false: in lano an instance ends where"),
    ):
        with pytest.raises(InvalidSetting, match=f"^{line}"):
            resolve(merge(lano, {"data": data}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=null"], "expected either task (a playground task) or text (token shards), got neither"),
        (["model.vocab_size=9"], "model.vocab_size: expected no value, as copying has its own vocabulary, got 9"),
        *(([f"parallel.activation_checkpointing={value}"], "parallel.activation_checkpointing: expected none, "
           f"selective, full or a number > 0 and < 1, the share to keep, got {shown}")
          for value, shown in (("half", '"half"'), ("1", "1"), ("true", "True"), ("[full]", "['full']"))),
        (["parallel.activation_checkpointing=0.5"], "parallel.activation_checkpointing: expected none, selective or "
         "full; a share of what is kept needs train.compile=true, got 0.5"),
        (["data.loss_on=null"], "data.loss_on: expected 'answer' or 'all', got None"),
        *(([f"profile={value}"], 'profile: expected start:stop with 1 <= start < stop, such as "10:13" for steps '
           f"10, 11, 12, got {shown}") for value, shown in (("10", "10"), ("5:5", '"5:5"'))),
        (["track=wandb"], 'track: expected a list, such as [wandb], got "wandb"'),
        (["task=depo"], 'task: expected a group of settings, such as {name: depo}, got "depo"'),
        (["text=data/web"],
         'text: expected a group of settings, such as {sources: {web: {path: data/web}}}, got "data/web"'),
        (["text.sources.web=data/web"],
         'text.sources.web: expected a group of settings, such as {path: data/web}, got "data/web"'),
        (["text={sources: {web: {path: x}}, validation: {web: {path: x}}}"],
         "text.validation.web: expected a folder, such as data/web, got {'path': 'x'}"),
        (["task=null", "text.sources={}"], "text.sources: expected at least 1, got {}"),
        (["task=null", "text.source={}"],
         'unknown setting "text.source". Did you mean "text.sources"? Settings: text.sources, text.validation.'),
        (["task=null", "text.sources={web: {path: x, wait: 2}}"],
         'unknown setting "text.sources.web.wait". Did you mean "text.sources.web.weight"? Settings: '
         "text.sources.web.path, text.sources.web.weight."),
        (["task=null", "text.sources={web: {path: x, weight: 0}}"],
         "text.sources.web.weight: expected a number > 0, got 0"),
        (["train.optim.decay_steps=2"],
         "train.optim.decay_steps: expected no value, as only schedule wsd uses it, got 2"),
        (["train.steps.x=1"],
         'train.steps.x: expected a key below a group of settings (steps is not a group), got "1"'),
    ],
)  # fmt: skip
def test_one_line_answers_a_wrong_override(write, overrides, message):
    with pytest.raises(InvalidSetting) as caught:
        load(write(), overrides)
    assert str(caught.value) == message


def test_changes_that_prevent_a_resume(tiny):
    def reading(path, weight=2.0, **more):
        text = {"sources": {"web": {"path": path, "weight": weight}}, "validation": {"web": path, **more}}
        return tiny(task=None, text=text, data={"loss_on": "all"})

    began, moved = reading("a"), reading("b")
    assert [key for key, _, _ in differences(began, moved)] == ["text.sources.web.path", "text.validation.web"]
    assert changes(began, moved) == []
    assert changes(began, reading("b", books="c")) == [("text.validation.books", None, "c")]
    assert changes(began, reading("b", weight=1.0)) == [("text.sources.web.weight", 2.0, 1.0)]
    longer = tiny(train={"steps": 41, "optim": {"schedule": "constant"}})
    assert changes(tiny(), longer) == [("train.optim.schedule", "cosine", "constant")]

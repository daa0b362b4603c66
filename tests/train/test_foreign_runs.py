"""Runs of models that are not our decoder, equal numbers of parameters, complete names in run folders."""

import random
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from canonlm.cli import main
from canonlm.launch.grid import plan
from canonlm.launch.recipes import load_preset
from canonlm.train.build import build_model, state_bytes, with_complete_name
from canonlm.train.checkpoint import load_model
from canonlm.train.load_config import load
from canonlm.train.loop import train

SHORT = {"steps": 12, "checkpoint_every": 4, "eval_every": 6, "optim": {"warmup_steps": 2}}


@pytest.mark.parametrize("arch", ["hf:qwen3", pytest.param("hf:nemotron_h", marks=pytest.mark.slow)])
def test_resumes_bit_for_bit(tiny, tmp_path, arch):
    run = tiny(arch=arch, train=SHORT)
    for name in ("whole", "cut"):
        train(run, tmp_path / name)
    tiny.back_to(tmp_path / "cut", 8)
    train(run, tmp_path / "cut")
    tiny.same(tmp_path / "cut", tmp_path / "whole")
    losses = [row["loss"] for row in tiny.rows(tmp_path / "whole") if row["kind"] == "train"]
    assert losses[-1] < losses[0]


OWN = """
import random
import torch
from torch import nn
from canonlm.models.mixers.recurrent import LinearAttention, mask_out
from canonlm.ops.ssd import ssd

class Dropping(LinearAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.drop = nn.Dropout(0.3)

    def recur(self, x, q, k, v, layout, state):
        steps, rates = mask_out(torch.ones_like(q[..., 0]), layout), -torch.full((q.shape[2],), 0.05)
        layout = {"doc_ids_BT": layout.doc_ids, "documents": layout.documents}
        return ssd(self.drop(v), steps, rates, k, q, state_BHPN=state, **layout)

class Net(nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size)

    def forward(self, ids):
        h = nn.functional.dropout(self.embed(ids), 0.3, self.training)
        return self.head(h if self.training and random.random() < 0.3 else h.relu())
"""


@pytest.mark.parametrize("name", ["Dropping", "Net"])
def test_own_code_that_draws_random_numbers_resumes_bit_for_bit(tiny, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    run = tiny(arch=f"own.py:{name}", train={**SHORT, "steps": 8})

    def losses(place):
        train(run, tmp_path / place)
        return [row["loss"] for row in tiny.rows(tmp_path / place)]

    uninterrupted = losses("whole")
    torch.manual_seed(99)
    random.seed(99)
    assert losses("cut") == uninterrupted
    tiny.back_to(tmp_path / "cut", 4)
    assert losses("cut") == uninterrupted


def test_models_that_cannot_be_trained_leave_no_row(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"^arch: hf:bert is not causal .* it cannot be trained as a language model"):
        train(tiny(arch="hf:bert", train=SHORT), tmp_path / "bert")
    with pytest.raises(ValueError, match=r"^data.isolate_documents: expected false with hf:lfm2, which lets"):
        train(tiny(arch="hf:lfm2", train=SHORT, data={"isolate_documents": True}), tmp_path / "lfm2")
    assert not [*tmp_path.glob("*/metrics.jsonl")]


def test_equal_numbers_of_parameters(tmp_path):
    archs = ["llama+canon", "llama", "gla5+canon", "mamba2-4.1", "hf:qwen3", "hf:gpt2"]
    runs = plan(load_preset("depo", "tiny"), tmp_path, archs=archs, match="parameters")
    counts = [build_model(run.config, "meta").num_parameters for run in runs]
    assert all(abs(count / counts[0] - 1) <= 0.01 for count in counts)
    assert runs[0].config.model.matched == {}
    changed = [(run, *change) for run in runs for change in run.config.model.matched.items()]
    assert len(changed) > 2
    assert all(run.config.model.fields[field] == after != before for run, field, (before, after) in changed)


@pytest.mark.parametrize("reference", ["gdn2", "llama+canon"])
def test_equal_bytes_of_state_by_the_rank_of_latents(tmp_path, reference):
    archs = [reference, "mla", "mla+canon=A", "mla+window=48+rope=0", "mla.llama"]
    runs = plan(load_preset("depo", "tiny"), tmp_path, archs=archs, match="state")
    states = [state_bytes(run.config) for run in runs]
    assert all(abs(state / states[0] - 1) <= 0.05 for state in states)
    assert [list(run.config.model.matched) for run in runs[1:4]] == [["kv_lora_rank"]] * 3
    for run in runs[1:4]:
        assert build_model(run.config).module.config.options(0).kv_lora_rank == run.config.model.fields["kv_lora_rank"]


def test_equal_bytes_of_state(tmp_path):
    archs = ["gdn2", "llama", "mamba2", "gla5", "gdn2.llama", "hf:qwen3", "hf:mamba2"]
    runs = plan(load_preset("depo", "tiny"), tmp_path, archs=archs, match="state")
    states = [state_bytes(run.config) for run in runs]
    assert all(abs(state / states[0] - 1) <= 0.05 for state in states)
    assert runs[0].config.model.matched == {}
    assert [list(run.config.model.matched) for run in runs[3:5]] == [[], ["linear_key_head_dim"]]
    both = plan(load_preset("depo", "tiny"), tmp_path, archs=archs[:3], match="state,parameters")
    assert [state_bytes(run.config) for run in both] == states[:3]
    counts = [build_model(run.config, "meta").num_parameters for run in both]
    assert all(abs(count / counts[0] - 1) <= 0.01 for count in counts)


@pytest.mark.parametrize(
    ("archs", "match", "expected"),
    [
        (["llama"], "flops", r'expected parameters, state or state,parameters, got "flops"'),
        *((["llama", arch], "parameters", f"{arch} has .* and it has no MLP whose width could change: name it first, "
           "and those of the others change") for arch in ("hf:mamba2", "hf:mamba")),
        (["mamba2", "hf:gpt2"], "state",
         r"hf:gpt2 has 131 kB of state after 64 tokens and the first .*, and none of its settings is known .*"),
        (["llama", "mamba2{state_size=4096}"], "state",  # a size in the name stays
         r"mamba2.* has 8.7 MB .* and no value of mamba_state_size, linear_value_head_dim makes up the difference"),
        (["llama", "hf:openai-gpt"], "state", "hf:openai-gpt has no state to count"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched_is_refused_in_one_line(tmp_path, archs, match, expected):
    with pytest.raises(ValueError, match=f"^--match: {expected}$"):
        plan(load_preset("depo", "tiny"), tmp_path, archs=archs, match=match)


@pytest.mark.parametrize("first", ["hf:mamba2", "hf:xlstm", "mamba2+mlp=none"])
def test_others_become_as_large_as_a_model_without_an_mlp(tmp_path, first):
    runs = plan(load_preset("depo", "tiny"), tmp_path, archs=[first, "llama+canon", "hf:qwen3"], match="parameters")
    counts = [build_model(run.config, "meta").num_parameters for run in runs]
    assert all(abs(count / counts[0] - 1) <= 0.01 for count in counts)


@pytest.mark.slow
def test_a_run_has_its_complete_name(tiny, tmp_path):
    """Fields about Canon become part of the name; those without a modifier stay fields."""
    fields = {"canon_residual": False, "canon_kernel": 3, "rope_theta": 5e5}
    run = tiny(model={"fields": fields}, train={**SHORT, "steps": 4})
    named = with_complete_name(run)
    assert (named.arch, named.model.fields) == ("llama+canon:k3:nores", {"rope_theta": 5e5})
    assert build_model(named).module.config == build_model(run).module.config
    assert with_complete_name(tiny(arch="llama+canon=DCBA")).arch == with_complete_name(tiny(arch="llama+canon")).arch
    train(run, tmp_path)
    assert load(tmp_path / "config.yaml") == named
    # A run of an earlier version, which stored the name as typed, continues.
    earlier = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"arch": "llama+canon"}
    earlier["model"]["fields"] = fields
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier))
    tiny.back_to(tmp_path, 4)
    train(run, tmp_path)
    assert load(tmp_path / "config.yaml") == named


def test_a_run_of_an_earlier_version_with_settings_without_effect_opens(tiny, tmp_path):
    run = tiny(arch="mla{num_key_value_heads=2}", model={"fields": {"conv_kernel": 3}}, train=SHORT)
    with pytest.raises(ValueError, match=r"^arch: expected an attention layer to read num_key_value_heads"):
        train(run, tmp_path)
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr("canonlm.models.decoder.check_read", lambda *_: None)
        earlier.setattr("canonlm.train.build.complete_name", lambda arch, sizes, **_: (arch, sizes.fields))
        train(run, tmp_path)
    assert main(["eval", str(tmp_path), "--suite", "playground", "n=8", "--out", str(tmp_path / "asked")]) == 0


def test_a_transformers_model_in_every_command(tiny, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    train(tiny(arch="hf:qwen3", train=SHORT), run)
    assert main(["plan", str(run / "config.yaml"), "--gpus", "2", "--gpu", "a10"]) == 0
    assert main(["eval", str(run), "--suite", "playground", "n=8", "--out", str(tmp_path / "asked")]) == 0
    assert main(["generate", str(run), "bos x1 x2 ans", "--max-tokens", "3"]) == 0
    assert main(["export", str(run), str(out)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert_close(exported.state_dict(), load_model(run).module.state_dict(), atol=0, rtol=0)
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "code"), "--self-contained"]) == 2
    what = "--self-contained only works with our decoder and with Canon layers, not with a plain qwen3"
    assert capsys.readouterr().err == f"canonlm: {what}\n"

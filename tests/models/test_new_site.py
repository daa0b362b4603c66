"""A site that docs/add-a-site.md adds: one row of the table, and everything works on it."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing import assert_close
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers a backend without communication
from transformers import LlamaConfig, LlamaForCausalLM

from canonlm import CanonLMConfig, CanonLMForCausalLM, canonize
from canonlm.canon.sites import SITES, Site
from canonlm.models import config as configuration
from canonlm.models import tensor_parallel
from canonlm.models.build import build, wrap
from canonlm.models.interface import SMALL
from canonlm.report import write_report
from canonlm.train.loop import train

PAGE = Path(__file__).parents[2] / "docs" / "add-a-site.md"
IDS = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """The page's row, in a module of its own, and one for the block's output."""
    [block] = re.findall(r"test_new_site.py runs this block -->\n```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    row = 'SITES["T"] = Site("T", "the block\'s output", "block", "output")\n'
    (tmp_path / "site_of_a_test.py").write_text(block + row)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(SITES)
    importlib.import_module("site_of_a_test")
    yield
    SITES.clear()
    SITES.update(before)
    configuration._parsed.cache_clear()
    del importlib.sys.modules["site_of_a_test"]


def test_the_layer_is_where_the_row_says(small_model):
    """The same weights, applied by hooks around the blocks of a model without the sites."""
    model = small_model(canon_set="AST:k3")
    plain = small_model(canon_set="A:k3")
    weights = model.state_dict()
    plain.load_state_dict({name: x for name, x in weights.items() if "canonS" not in name and "canonT" not in name})
    for block, ours in zip(plain.model.layers, model.model.layers, strict=True):
        block.register_forward_pre_hook(lambda _, args, canon=ours.canonS: (canon(args[0]), *args[1:]))
        block.register_forward_hook(lambda _, args, out, canon=ours.canonT: (canon(out[0]), *out[1:]))
    assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-10, rtol=0)


def test_it_decodes_and_packs(small_model):
    model = small_model(canon_set="ABST:k3")
    logits = model(IDS).logits
    first = model(IDS[:, :6], use_cache=True)
    steps = [first.logits]
    for t in range(6, 11):
        steps.append(model(IDS[:, t : t + 1], past_key_values=first.past_key_values).logits)
    assert_close(torch.cat(steps, dim=1), logits, atol=1e-10, rtol=0)
    packed = model(IDS, doc_ids=torch.tensor([[0] * 4 + [1] * 7] * 2), use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in (IDS[:, :4], IDS[:, 4:])]
    assert_close(packed, torch.cat(alone, dim=1), atol=1e-10, rtol=0)


def test_it_has_a_name_and_is_saved(tmp_path):
    model = build("llama+canon=SA:k3", SMALL)
    assert model.arch == "llama+canon=AS:k3"
    model.module.save_pretrained(tmp_path)
    again = CanonLMForCausalLM.from_pretrained(tmp_path)
    assert again.config.arch == wrap(again).arch == model.arch
    assert_close(again(IDS).logits, model.module.eval()(IDS).logits)
    with pytest.raises(ValueError, match=r"^canon_set: expected :dynamic at Q, K, V only"):
        CanonLMConfig(canon_set="S:dynamic")


def test_it_is_complete_on_every_device():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = build("llama+canon=ABS", SMALL).module
        tensor_parallel.split_layer(model.model.layers[0], init_device_mesh("cpu", (2,)))
        placements = {name: p.placements for name, p in model.model.layers[0].named_parameters() if "canon" in name}
        assert placements["canonS.weight"] == placements["canonA.weight"] == (Replicate(),)
        assert placements["self_attn.canonB_q.weight"] == (Shard(0),)
    finally:
        dist.destroy_process_group()


def test_canonize(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    host = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
    before = host(IDS).logits
    canonize(host, "ST")
    assert_close(host(IDS).logits, before)  # the layers start as the identity
    assert {name for name, _ in host.model.layers[1].named_children()} >= {"canon_S", "canon_T"}
    for block in host.model.layers:
        for canon in (block.canon_S, block.canon_T):
            torch.nn.init.normal_(canon.weight, std=0.3)
    after = host(IDS).logits
    assert not torch.allclose(after, before)
    first = host(IDS[:, :6], use_cache=True)
    rest = host(IDS[:, 6:], past_key_values=first.past_key_values)
    assert_close(torch.cat([first.logits, rest.logits], dim=1), after)
    host.save_pretrained(tmp_path)
    assert_close(type(host).from_pretrained(tmp_path)(IDS).logits, after)


def test_it_is_not_saved_with_code(tmp_path, small_model):
    """The code in the folder would not have the row."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    host = canonize(LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)), "AST")
    for model in (small_model(canon_set="AST"), host):
        with pytest.raises(ValueError, match=r"^self_contained: expected False with site S, T, which only your own"):
            model.save_pretrained(tmp_path / "saved", self_contained=True)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("part", "side"), [("mixer", "middle"), ("mixr", "input"), ("model", "output")])
def test_a_row_has_a_place(part, side):
    with pytest.raises(ValueError, match=r"^site Y: expected a part and one of its sides \(model: input; "):
        Site("Y", "a typo", part, side)


def test_a_run_and_its_report(tiny, tmp_path):
    run = tiny(arch="llama+canon=AS", train={"steps": 4})
    train(run, tmp_path / "run")
    assert tiny.rows(tmp_path / "run")
    assert "llama+canon=AS" in write_report(tmp_path).read_text()

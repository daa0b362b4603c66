"""Mixers from a user's file (docs/add-a-mixer.md): their names, sites and options, and the mistakes in them."""

import copy
import re
import subprocess
import sys

import pytest
import torch

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.canon.sites import SITES, Site
from canonlm.models import config as configuration
from canonlm.models.build import build
from canonlm.models.interface import SMALL
from canonlm.models.mixers import MIXERS

CODE = '''
from dataclasses import dataclass
from typing import Literal, Optional

from torch import nn

from canonlm.canon.variants import make_canon
from canonlm.models.mixers.base import Mixer, Options
from canonlm.models.mixers.recurrent import RecurrentMixer


class Line(Mixer):
    """It mixes nothing."""

    recurrent = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.line = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD, layout, *args, **kwargs):
        return self.line(x_BTD), None


class WithB(Line):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.add_canons({"x": config.hidden_size})


class WithG(Line):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if "G" in config.canons(layer_idx):
            self.add_module("canonG_g", make_canon(config.canons(layer_idx)["G"], config.hidden_size))


class Recurrent(RecurrentMixer):
    def mix(self, x_BTD, layout, cache, state):
        return x_BTD, x_BTD[:, -1]


class Options(Options):
    taps: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] | None = None
    others: Optional[tuple[float, ...]] = None
    plain: tuple = ("x",)
    listed: list | None = None
    either: list[int] | tuple[int, ...] = (1,)
    kind: Literal["a", "b"] = "a"


class WithOptions(Line):
    Options = dataclass(Options)


class Raises(Line):
    def __init__(self, config, layer_idx):
        raise RuntimeError("line one\\nline two")


Again = Line
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SITES, "G", Site("G", "a gate", "mixer", "inside"))
    (tmp_path / "mine.py").write_text(CODE)
    before = dict(MIXERS)
    yield tmp_path
    MIXERS.clear()
    MIXERS.update(before)
    configuration._parsed.cache_clear()


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("mine.py:Line+canon", "sites with a layer, as in +canon=ACD: no code of this model makes one at B"),
        ("mine.py:Line+canon:k3", "sites with a layer, as in +canon=ACD:k3: no code of this model makes one at B"),
        ("mine.py:Recurrent+canon=Q", "sites with a layer: no code of this model makes one at B"),
        ("mine.py:Recurrent{canon_set=Ab}", "sites with a layer, as in +canon=A: no code of this model makes one at b"),
        ("llama+canon=AG", "sites with a layer, as in +canon=A: no code of this model makes one at G"),
        ("mine.py:Line.llama+canon=BG", "sites with a layer, as in +canon=B: no code of this model makes one at G"),
    ],
)
def test_a_site_without_a_layer_is_refused(arch, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(arch, SMALL)


def test_a_site_without_a_layer_is_refused_in_a_configuration_too():
    build("mine.py:Line", SMALL)  # which registers it
    for fields, example, site in [({"canon_set": "ABCD"}, "ACD", "B"), ({"canon_sets": ["AG", "A"]}, "A", "G")]:
        config = CanonLMConfig(mixers=["mine.py:Line"], hidden_size=16, num_attention_heads=2, **fields)
        message = f"{next(iter(fields))}: expected sites with a layer, as in {example}: no code of this model makes one"
        with pytest.raises(ValueError, match=f"^{message} at {site}, got "):
            CanonLMForCausalLM(config)


@pytest.mark.parametrize(
    "arch",
    ["mine.py:Line+canon=ACD", "mine.py:Recurrent+canon", "mine.py:WithB+canon", "mine.py:WithG.llama+canon=G"],
)
def test_a_site_with_a_layer(arch):
    assert build(arch, SMALL).num_parameters > build(arch.partition("+")[0], SMALL).num_parameters


def test_a_saved_model_with_a_site_without_a_layer_opens(folder):
    model = build("mine.py:Line+canon", SMALL, saved=True).module
    model.save_pretrained(folder / "saved")
    opened = CanonLMForCausalLM.from_pretrained(folder / "saved")
    assert opened.config.canon_set == "ABCD"
    torch.testing.assert_close(opened.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mine.py:Line", "mine.py:Again"),
        ("mine.py:Line", "./mine.py:Line"),
        ("gdn2", "canonlm.models.mixers.gdn:GatedDeltaNet"),
    ],
)
def test_one_class_has_several_names(first, second):
    """Also while a model of the other name is in use."""
    models = [build(arch, SMALL) for arch in (first, second, first, f"{first}+canon=A", second)]
    assert [model.arch for model in models] == [first, second, first, f"{first}+canon=A", second]
    for model in models:
        again = CanonLMForCausalLM(model.module.config)
        assert again.num_parameters() == model.num_parameters


READ = """
import sys, torch
print(torch.load(sys.argv[1], weights_only=False)(torch.arange(9)[None]).logits.sum().item())
"""


def test_a_pickled_model_is_read_in_another_process(folder):
    """From the unchanged file; the class of a second name, and of a copy in this process, is the same."""
    for arch in ("mine.py:WithOptions{taps=[3]}", "mine.py:Again"):
        model = build(arch, SMALL).module
        assert {type(a) is type(b) for a, b in zip(model.modules(), copy.deepcopy(model).modules(), strict=True)} == {
            True
        }
        torch.save(model, folder / "model.pt")
        command = [sys.executable, "-c", READ, str(folder / "model.pt")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert float(done.stdout) == model(torch.arange(9)[None]).logits.sum().item()
    (folder / "mine.py").write_text(f"{CODE}# changed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "expected the file that the other process has run, unchanged" in done.stderr


def test_options_are_saved(folder):
    """Tuples, too, which are lists in JSON."""
    for arch in (
        "mine.py:WithOptions",
        "mine.py:WithOptions{either=[3],kind=b,listed=[4],others=[1,2.5],pair=[2,b],taps=[3]}",
    ):
        model = build(arch, SMALL)
        assert model.arch == arch
        model.module.save_pretrained(folder / "saved")
        saved = CanonLMForCausalLM.from_pretrained(folder / "saved")
        assert saved.config.options(0) == model.module.config.options(0)
        torch.testing.assert_close(saved.state_dict(), model.module.state_dict())
    with pytest.raises(ValueError, match=r"taps: expected a value of type tuple\[int, \.\.\.\], got \['a'\]$"):
        build("mine.py:WithOptions{taps=[a]}", SMALL)
    with pytest.raises(ValueError, match=r"kind: expected a value of type Literal\['a', 'b'\], got \"z\"$"):
        build("mine.py:WithOptions{kind=z}", SMALL)


def test_options_whose_types_are_text_are_checked_and_saved(folder):
    (folder / "future.py").write_text(f"from __future__ import annotations\n{CODE}")
    model = build("future.py:WithOptions{pair=[2,b],taps=[3]}", SMALL)
    model.module.save_pretrained(folder / "saved")
    saved = CanonLMForCausalLM.from_pretrained(folder / "saved").config
    assert saved.options(0) == model.module.config.options(0)
    assert saved.options(0).pair == (2, "b")
    for value in ("[a]", "2", "true"):
        with pytest.raises(ValueError, match=r"future.py:WithOptions.taps: expected a value of type tuple\[int, "):
            build(f"future.py:WithOptions{{taps={value}}}", SMALL)


def test_a_mixer_that_raises_is_refused_in_one_line():
    line = CODE[: CODE.index("raise RuntimeError")].count("\n") + 1
    message = f"arch: mine.py:Raises cannot be built (RuntimeError: line one line two, line {line}); "
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        build("mine.py:Raises", SMALL)
    assert "\n" not in str(error.value)


def test_it_is_not_saved_with_code(folder):
    for arch in ("mine.py:Line", "canonlm.models.mixers.gdn:GatedDeltaNet"):
        with pytest.raises(ValueError, match=f"^self_contained: expected False with {arch}: only our own mixers"):
            build(arch, SMALL).module.save_pretrained(folder / "saved", self_contained=True)
    assert not (folder / "saved").exists()

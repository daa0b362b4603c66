"""Exported programs of any length against the model itself."""

import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from canonlm import CanonLayer, CanonLMConfig, CanonLMForCausalLM, canonize

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "initializer_range": 0.2}
MODELS = {
    "gla": {"num_hidden_layers": 1, "mixers": ["gla"], "canon_set": "A"},
    "experts": {"num_hidden_layers": 1, "canon_set": "A", "mlp": "moe", "num_experts": 2},
    "all": {  # every operator of a mixer: gdn's is deltaproduct's with one step, retention's is mamba2's
        **{"mixers": ["gla", "mamba2", "delta_vec", "deltaproduct", "rwkv7", "mamba3", "attention"]},
        **{"num_hidden_layers": 7, "canon_set": "A", "mlp": "none"},
    },
}
ANY = {"input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}


class Outputs(torch.nn.Module):
    """The logits, and what the cache holds after them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        output = self.model(input_ids=input_ids)
        held = [output.logits]
        for layer in output.past_key_values.layers:
            for kind in ("conv_states", "recurrent_states"):
                held += [state for state in getattr(layer, kind, {}).values() if state is not None]
        return tuple(held)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class Step(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state):
        return self.layer(x, state=state, return_state=True)


def model_of(name):
    torch.manual_seed(0)
    return CanonLMForCausalLM(CanonLMConfig(**SIZES, **MODELS[name])).eval()


def example(name):
    outputs = Outputs(model_of(name))
    program = torch.export.export(outputs, (torch.randint(50, (2, 23)),), dynamic_shapes=ANY)
    assert "canonlm" not in str(program.graph), "operators that only canonlm has"
    return outputs, program


def check(run, outputs):
    """Also for rows shorter than a kernel, and longer than a chunk."""
    for batch, time in ((1, 2), (3, 70)):
        ids = torch.randint(50, (batch, time))
        assert_close(run(ids), outputs(ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_program_of_any_length_equals_the_model():
    """And so do its states; a program with experts is below."""
    outputs, program = example("gla")
    check(program.module(), outputs)


@pytest.mark.parametrize("host", [None, "llama"])
@torch.no_grad()
def test_a_program_takes_any_padding(host):
    model = model_of("experts")
    if host:
        sizes = {**SIZES, "num_hidden_layers": 1, "intermediate_size": 64}
        model = canonize(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "AC")
    ids, mask = torch.randint(50, (2, 23)), torch.ones(2, 23, dtype=torch.long)
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in ("input_ids", "attention_mask")}
    kwargs = {"input_ids": ids, "attention_mask": mask}
    program = torch.export.export(Logits(model), (), kwargs, dynamic_shapes=shapes)
    for batch, time in ((1, 5), (3, 40)):
        ids, mask = torch.randint(50, (batch, time)), torch.ones(batch, time, dtype=torch.long)
        mask[0, :3] = 0
        got, expected = (run(input_ids=ids, attention_mask=mask) for run in (program.module(), Logits(model)))
        assert_close(got[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)


def test_a_decoding_step_of_a_canon_layer_takes_any_batch():
    layer = Step(CanonLayer(5, residual=False))
    shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    program = torch.export.export(layer, (torch.randn(2, 1, 5), torch.randn(2, 5, 4)), dynamic_shapes=shapes)
    x, state = torch.randn(4, 1, 5), torch.randn(4, 5, 4)
    assert_close(program.module()(x, state), layer(x, state))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "all"])
@torch.no_grad()
def test_onnx_of_any_length_equals_the_model(name, tmp_path):
    import onnxruntime

    outputs, program = example(name)
    torch.onnx.export(program, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")

    def run(ids):
        return tuple(torch.from_numpy(array) for array in session.run(None, {"input_ids": ids.numpy()}))

    check(run, outputs)

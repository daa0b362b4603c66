"""At the sites of Inkling and Inkling2 our decoder computes the same as transformers' classes.

The inputs of our Canon layers in a forward are passed to the library's modules, with the same weights and the library's
cache, and the outputs are compared: whole rows, padded ones, and decoding.
"""

import functools

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from canonlm.canon.layer import CanonLayer
from canonlm.canon.variants import DynamicCanon
from canonlm.ops.varlen import Layout

inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling", reason="came with transformers 5.19")
inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2", reason="came with transformers 5.23")

SETS = {"inkling": "KVOM", "inkling2": "KV:dynamic:scaled,OM:scaled"}
ORDER = ["canonB_k", "canonB_v", "canonO", "canonM"]
"""The order of the library's convolution states."""


def reference(kind, canon, layer_idx, conv_idx):
    """The library's module with the weights of `canon`."""
    library = inkling if kind == "inkling" else inkling2
    if isinstance(canon, DynamicCanon):
        heads = canon.hidden_size // canon.head_dim
        sizes = (canon.hidden_size, canon.input_size, heads, canon.kernel_size)
        module = library.Inkling2DynamicShortConvolution(*sizes, layer_idx, conv_idx)
        taps = canon.taps_weight.data.unflatten(0, (heads, canon.kernel_size))
        module.weight_proj.weight.data.copy_(taps.flip(1).flatten(0, 1))  # its first tap is that of the current token
        module.static_weight.data.copy_(canon.weight.data[:, 0].flip(1).t())
        return module
    name = "InklingShortConvolution" if kind == "inkling" else "Inkling2ShortConvolution"
    module = getattr(library, name)(canon.hidden_size, canon.kernel_size, layer_idx, conv_idx)
    module.conv1d.weight.data.copy_(canon.weight.data)
    return module


def library_cache(kind):
    text = (inkling.InklingTextConfig if kind == "inkling" else inkling2.Inkling2TextConfig)(num_hidden_layers=2)
    assert text.number_of_conv_states == 4
    return DynamicCache(config=text)


@pytest.fixture(params=SETS)
def compared(request, small_model):
    """(model, modules, calls): every call of a Canon layer, as (module, x, mixer input, mask, output)."""
    model = small_model(torch.float32, canon_set=SETS[request.param])
    calls, modules = [], []

    def record(module, layer, args, kwargs, output):
        y = output[0] if isinstance(output, tuple) else output
        calls.append((module, args[0], kwargs["mixer_input"], kwargs["layout"].attention_mask, y))

    for layer_idx, block in enumerate(model.model.layers):
        for name, canon in block.named_modules():
            if isinstance(canon, CanonLayer):
                modules.append(reference(request.param, canon, layer_idx, ORDER.index(name.rpartition(".")[2])))
                canon.register_forward_hook(functools.partial(record, modules[-1]), with_kwargs=True)
    assert len(modules) == 8
    return model, library_cache(request.param), calls


def answer(module, x, mixer_input, mask, cache=None):
    inputs = (x, mixer_input) if isinstance(module, inkling2.Inkling2DynamicShortConvolution) else (x,)
    return module(*inputs, past_key_values=cache, conv_mask=mask)


def test_values_and_gradients(compared):
    model, _, calls = compared
    model(torch.randint(0, 61, (2, 9)), use_cache=False)
    assert len(calls) == 8
    for module, x, mixer_input, mask, _ in list(calls):
        x, u = x.detach().requires_grad_(), None if mixer_input is None else mixer_input.detach().requires_grad_()
        canon = next(c for c in model.modules() if isinstance(c, CanonLayer) and _same_weights(c, module))
        dynamic = isinstance(canon, DynamicCanon)
        ours, theirs = canon(x, mixer_input=u, layout=Layout(mask)), answer(module, x, u, mask)
        assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
        weights = torch.randn_like(ours)
        inputs = [x, u] if dynamic else [x]
        got = torch.autograd.grad((ours * weights).sum(), [*inputs, *canon.parameters()])
        want = torch.autograd.grad((theirs * weights).sum(), [*inputs, *module.parameters()])
        assert_close(got[: len(inputs)], want[: len(inputs)], atol=1e-5, rtol=1e-5)
        if dynamic:
            assert_close(got[-2][:, 0].flip(1).t(), want[-2], atol=1e-5, rtol=1e-5)
            by_head = got[-1].unflatten(0, (-1, canon.kernel_size)).flip(1).flatten(0, 1)
            assert_close(by_head, want[-1], atol=1e-5, rtol=1e-5)
        else:
            assert_close(got[-1], want[-1], atol=1e-5, rtol=1e-5)


def _same_weights(canon, module):
    if isinstance(canon, DynamicCanon):
        static = getattr(module, "static_weight", None)
        return static is not None and static.t().flip(1).equal(canon.weight[:, 0])
    return hasattr(module, "conv1d") and module.conv1d.weight.equal(canon.weight)


@pytest.mark.parametrize("pads", [0, 3])
def test_decoding_with_a_cache(compared, pads):
    model, cache, calls = compared
    ids, mask = torch.randint(0, 61, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :pads] = 0
    ours, done = DynamicCache(config=model.config), 0
    for piece in (6, 2, 1, 1, 1, 1):
        with torch.no_grad():
            model(ids[:, done : done + piece], attention_mask=mask[:, : done + piece], past_key_values=ours)
        done += piece
    assert len(calls) == 6 * 8
    for module, x, mixer_input, layout_mask, y in calls:
        real = slice(pads, None) if x.shape[1] > pads else slice(None)
        with torch.no_grad():
            theirs = answer(module, x, mixer_input, layout_mask if x.shape[1] > 1 else None, cache)
        assert_close(y[:, real], theirs[:, real], atol=2e-6, rtol=1e-5)

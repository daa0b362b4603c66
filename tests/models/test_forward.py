"""The forward call: losses, checkpointing, autocast, compilers and attention kernels."""

import pytest
import torch
from torch.testing import assert_close

from canonlm.canon import CanonLayer
from canonlm.models.cache import documents_from_positions

IDS = torch.arange(36).reshape(2, 18) * 7 % 61
DOC_IDS = torch.tensor([[3] * 5 + [1] * 2 + [3] * 11, [0] * 18])
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    output = model(**{"input_ids": IDS, "labels": IDS, **inputs})
    output.loss.backward()
    return {"loss": output.loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}


def test_loss_is_the_mean_over_labelled_tokens(small_model):
    model = small_model(canon_set="A")
    labels = IDS.masked_fill(IDS % 3 == 0, -100)
    output = model(IDS, labels=labels)
    log_p = output.logits.log_softmax(-1)
    terms = [
        -log_p[b, t, labels[b, t + 1]] for b in range(2) for t in range(IDS.shape[1] - 1) if labels[b, t + 1] != -100
    ]
    assert_close(output.loss, sum(terms) / len(terms), **CLOSE)
    assert_close(model(IDS, labels=labels, num_items_in_batch=100).loss, sum(terms) / 100, **CLOSE)
    assert output.loss.dtype == torch.float64
    assert small_model(torch.bfloat16)(IDS, labels=labels).loss.dtype == torch.float32


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([0, 7])])
def test_logits_to_keep(small_model, keep):
    model = small_model(canon_set="ABCD")
    places = slice(-keep, None) if isinstance(keep, int) else keep
    assert_close(model(IDS, logits_to_keep=keep).logits, model(IDS).logits[:, places], **CLOSE)


def test_embeddings_instead_of_ids(small_model):
    model = small_model(canon_set="ABCD")
    assert_close(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, model(IDS).logits, **CLOSE)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(IDS, inputs_embeds=model.get_input_embeddings()(IDS))


def test_no_positions_at_all(small_model):
    model = small_model(canon_set="", rope_dim=0)
    positions = torch.arange(18).flip(0)[None]
    assert_close(model(IDS, position_ids=positions, doc_ids=DOC_IDS * 0).logits, model(IDS).logits, **CLOSE)


# Documents


@pytest.mark.parametrize(("kernel", "atol"), [("eager", 1e-4), ("sdpa", 1e-10)])  # eager has a float32 softmax
def test_attention_kernels_agree_on_documents(small_model, kernel, atol):
    """With each document alone. flex_attention and flash attention: test_documents.py."""
    model = small_model(canon_set="ABCD")
    rows = zip(IDS, ([5, 2, 11], [18]), strict=True)
    with torch.no_grad():
        expected = [torch.cat([model(part[None]).logits[0] for part in row.split(sizes)]) for row, sizes in rows]
        model.set_attn_implementation(kernel)
        got = model(IDS, doc_ids=DOC_IDS, use_cache=False).logits
    assert_close(got, torch.stack(expected), atol=atol, rtol=0)


def test_a_repeated_document_id_starts_another_document(small_model):
    model = small_model(canon_set="ABCD")
    logits = model(IDS, doc_ids=DOC_IDS).logits
    assert_close(logits[:1, 7:], model(IDS[:1, 7:]).logits, **CLOSE)


def documents(position_ids, mask):
    result = documents_from_positions(torch.tensor([position_ids]), torch.tensor([mask]))
    return None if result is None else result[0].tolist()


def test_repeated_positions_of_padding_are_not_documents():
    assert documents([0, 0, 0, 1, 2], [0, 0, 1, 1, 1]) is None
    assert documents([1, 1, 0, 1, 2], [0, 0, 1, 1, 1]) is None
    assert documents([0, 1, 2, 0, 0], [1, 1, 1, 0, 0]) is None
    assert documents([0, 1, 1, 2, 3], [1, 1, 0, 1, 1]) is None
    assert documents([0, 1, 0, 0, 1], [1, 1, 0, 1, 1]) == [0, 0, 0, 1, 1]
    assert documents([0, 1, 0, 0, 1], [1, 1, 1, 1, 1]) == [0, 0, 1, 2, 2]


# Precision


def dtypes_seen(model, **inputs):
    """The dtypes of all residual streams and all Canon outputs of a training call under autocast."""
    seen = {"stream": set(), "canon": set()}
    for name, module in model.named_modules():
        if isinstance(module, CanonLayer):
            kind = "canon_in_mixer" if "canonB" in name or "canonD" in name else "canon"
        elif type(module).__name__ == "DecoderLayer":
            kind = "stream"
        else:
            continue
        module.register_forward_hook(lambda m, i, out, kind=kind: seen.setdefault(kind, set()).add(out[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(labels=IDS, use_cache=False, **inputs).loss
    loss.backward()
    return loss.dtype, seen


@pytest.mark.parametrize("canon", [{}, {"canon_activation": True, "canon_bias": True, "canon_residual": False}])
def test_under_autocast_canon_never_widens_the_stream(small_model, canon):
    bf16, fp32 = torch.bfloat16, torch.float32
    # Given bfloat16, the stream stays bfloat16; float32 embeddings keep it float32, as in transformers' Llama, and
    # Canon-B and Canon-D stay in the bfloat16 of the matrix products around them.
    model = small_model(fp32, canon_set="ABCD", qk_norm=True, **canon).train()
    embeds = model.get_input_embeddings()(IDS)
    assert dtypes_seen(model, inputs_embeds=embeds.to(bf16)) == (
        fp32,
        {"stream": {bf16}, "canon": {bf16}, "canon_in_mixer": {bf16}},
    )
    model = small_model(fp32, canon_set="ABCD", qk_norm=True, **canon).train()
    assert dtypes_seen(model, input_ids=IDS) == (fp32, {"stream": {fp32}, "canon": {fp32}, "canon_in_mixer": {bf16}})
    assert {parameter.grad.dtype for parameter in model.parameters()} == {fp32}


def test_double_stays_double(small_model):
    """No intermediate is float32: the float32 result differs, and the double one is exact to 1e-12."""
    model = small_model(canon_set="ABCD", qk_norm=True)
    expected = model(IDS, doc_ids=DOC_IDS).logits
    shuffled = model(IDS.flip(0), doc_ids=DOC_IDS.flip(0)).logits.flip(0)
    assert_close(shuffled, expected, atol=1e-12, rtol=0)
    rounded = small_model(torch.float32, canon_set="ABCD", qk_norm=True)(IDS, doc_ids=DOC_IDS).logits
    assert 1e-8 < (rounded - expected).abs().max() < 1e-3


# Compilers


@pytest.mark.slow
def test_compiles_forward_and_backward_without_graph_breaks(small_model, monkeypatch):
    """With documents; without them, and every mixer: test_hf_native.py."""
    model = small_model(canon_set="ABCD").train()
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda text, *_, **__: pytest.fail(text), False)
    expected = loss_and_gradients(model, use_cache=False, doc_ids=DOC_IDS)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    model.zero_grad()
    loss = compiled(input_ids=IDS, labels=IDS, use_cache=False, doc_ids=DOC_IDS).loss
    loss.backward()
    got = {"loss": loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}
    torch._dynamo.reset()
    assert_close(got, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("mixer", "sites"), [("attention", "ABCDEOM"), ("gdn", "AbBC")])
def test_print_shows_canon_layers_where_they_act(small_model, mixer, sites):
    text = str(small_model(mixers=[mixer], canon_set=sites, num_hidden_layers=1, qk_norm=mixer == "attention").model)
    names = [line.strip(" (").partition(")")[0] for line in text.splitlines() if ": " in line]
    if mixer == "attention":
        inside = ["q_proj", "q_norm", "canonB_q", "k_proj", "k_norm", "canonB_k", "v_proj", "canonB_v", "o_proj"]
        mlp = ["gate_proj", "canonD_gate", "up_proj", "canonD_up", "down_proj", "act_fn"]
        block = ["input_layernorm", "canonA", "self_attn", *inside, "canonO", "post_attention_layernorm", "canonC"]
        assert names == ["embed_tokens", "canonE", "layers", "0", *block, "mlp", *mlp, "canonM", "norm"]
    else:
        assert names.index("canonA") < names.index("mixer") < names.index("q_proj") < names.index("q_conv1d")
        assert names.index("q_conv1d") + 1 == names.index("canonB_q")

"""FLOPs against torch's counter on real models and chunked recurrences, and against sums by hand; memory against the
tensors that a graph keeps."""

import pytest
import torch
from saved_runs import OF_TEXT
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models import mixers, names
from canonlm.models.block import DecoderLayer
from canonlm.models.build import build
from canonlm.models.cache import Layout
from canonlm.models.decoder import Decoder
from canonlm.models.interface import SMALL
from canonlm.models.mixers.base import CHUNK, MIXERS
from canonlm.models.positions import rotary_table
from canonlm.ops import gated_delta_rule as gdn
from canonlm.ops import gated_linear_attention as gla
from canonlm.ops import ssd
from canonlm.train import flops, memory
from canonlm.train.config import resolve
from canonlm.train.load_config import merge
from canonlm.train.recompute import recomputed

NAMES = [*names.bases(), "llama+canon+qknorm", "llama+gate", "llama+attnres", "gla5+canon", "gdn2.llama+canon"]


def config_of(name, **sizes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97, **sizes}
    named = names.resolve(name, hidden_size=sizes["hidden_size"], num_heads=4)
    return CanonLMConfig(**sizes, **named)


def model_of(config):
    with torch.device("meta"):
        return Decoder(CanonLMForCausalLM(config))


def recurrence_of(mixer, seq_len=10_000, **options):
    """The FLOPs of a mixer with these options, per token."""
    config = CanonLMConfig(mixers=[mixer], num_hidden_layers=1, mixer_options={mixer: options})
    return MIXERS[mixer].flops(config, seq_len)


def counted(run, mapping=None):
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return counter.get_total_flops()


def test_convolutions_are_counted_wherever_they_are():
    """A multiply-add for each of four taps and 64 channels; E is once in the model, the others in both blocks."""
    per_layer = 2 * 4 * 64
    for sites, number in {"A": 2, "E": 1, "EACO": 7}.items():
        assert model_of(config_of(f"llama+canon={sites}")).forward_flops(96)["conv"] == number * per_layer


@pytest.mark.parametrize(
    ("site", "by_hand"),
    [
        ("A:avg", 2 * 4 * 64),
        ("A:k7", 2 * 7 * 64),
        ("A:smear", 2 * (64 + 12)),  # one tap, and a gate from 12 channels
        ("K:offset", 0),  # half of the channels move, and nothing is computed
        ("K:dynamic", 2 * 4 * 64 + 2 * 4 * 64 + 2 * (4 * 4) * 64),  # shared taps, own ones, and four of these a head
    ],
)
def test_forms_without_taps_of_their_own_are_counted_too(site, by_hand):
    assert model_of(config_of(f"llama+canon={site}")).forward_flops(96)["conv"] == 2 * by_hand


@pytest.mark.parametrize("name", [*NAMES, "llama+mlp=standard", "llama+mlp=none"])
def test_matrix_products_of_the_model(name):
    """All but recurrences and convolutions, which torch's counter misses; it counts attention's full square."""
    seq_len, config = 96, config_of(name)
    config._attn_implementation = "eager"
    model, tokens = CanonLMForCausalLM(config), torch.zeros(1, seq_len, dtype=torch.int64)
    parts = model_of(config).forward_flops(seq_len)
    full = parts["linear"] + parts["head"] + 2 * parts["attention"]

    def forward():
        return model(tokens, use_cache=False).logits.sum()

    assert counted(forward) == seq_len * full
    # Forward and backward: each product has two in the backward.
    assert counted(lambda: forward().backward()) == 3 * seq_len * full


@pytest.mark.parametrize("window", [2, 100, 500])
def test_a_window_by_hand(window):
    """A token takes 4 H E per token that it sees, one half less (T / 2 keys instead of (T + 1) / 2)."""
    seen = sum(min(t + 1, window) for t in range(128)) / 128
    counted = model_of(config_of(f"llama+window={window}")).forward_flops(128)["attention"] / (2 * 4 * 64)
    assert counted == pytest.approx(seen - min(window, 128) / 256)


@pytest.mark.parametrize("name", ["llama{}.mla", "llama.mla{}", "llama{}.mla{}", "llama{}.llama.mla.mla{}"])
def test_a_window_counts_in_the_layers_that_have_it(name):
    def attention(name, layers):
        return model_of(config_of(f"{name}+rope=0.5", num_hidden_layers=layers)).forward_flops(512)["attention"]

    name = name.replace("{}", "{sliding_window=64}")
    parts = name.split(".")
    assert attention(name, len(parts)) == pytest.approx(sum(attention(part, 1) for part in parts))


def test_a_llama_by_hand():
    d, w, h, e, layers, vocab, t = 64, 170, 4, 16, 2, 97, 128
    config = config_of("llama+canon", num_key_value_heads=2)
    linear = d * h * e + 2 * d * 2 * e + h * e * d + 3 * d * w
    canon = 4 * (d + h * e + 2 * 2 * e + d + 2 * w)
    scores_and_values = 2 * sum(2 * h * e * (keys + 1) for keys in range(t)) / t  # causal, to the token
    forward = 2 * (layers * (linear + canon) + d * vocab) + layers * scores_and_values
    assert config.intermediate_size == w
    counted = flops.flops_per_token(model_of(config), t)
    assert counted == pytest.approx(3 * forward, rel=2 / t)  # T / 2 keys instead of (T + 1) / 2
    assert counted == 3 * (forward - layers * 2 * h * e)


def test_a_token_has_one_expert():
    experts, plain = (model_of(config_of(f"llama{mlp}")).forward_flops(64)["linear"] for mlp in ("+mlp=moe", ""))
    assert experts == plain + 2 * 2 * 64 * 32  # and the router


def in_place(x, a, b, *_, **__):
    """torch's counter supports `baddbmm` but not its in-place form."""
    return 2 * a[0] * a[1] * a[2] * b[2]


H, K, V, T = 3, 16, 24, 256


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_chunks_of_gated_linear_attention():
    """The scores within eight tokens are not matrix products: nine multiply-adds per key channel and token, for the
    causal half of 8 x 8."""
    inputs = random(1, T, H, K), random(1, T, H, K), random(1, T, H, V), -random(1, T, H, K).abs()
    near = T * H * 2 * 4.5 * K
    made = counted(lambda: gla._forward._init_fn(*inputs, None, random(1, H, K, V), CHUNK))
    assert made + near == T * recurrence_of("gla", num_heads=H, key_head_dim=K, value_head_dim=V)


@pytest.mark.parametrize(
    ("mixer", "steps"), [("gdn", 1), ("deltaproduct", 2), ("kda", 1), ("delta_vec", 1), ("rwkv7", 2)]
)
def test_chunks_of_the_delta_rule(mixer, steps):
    """The counter misses the triangular system: n^2 multiply-adds, halved, for each of n right-hand sides; and with a
    decay per channel the scores within eight tokens, of queries and of read keys."""
    by_channel, time = mixer in ("kda", "delta_vec", "rwkv7"), steps * T
    g, beta = -random(1, time, H, K if by_channel else 1).abs(), random(1, time, H, 1).sigmoid()
    inputs = random(1, time, H, K), random(1, time, H, K), random(1, time, H, V), g, beta
    r = random(1, time, H, K) if mixer in ("delta_vec", "rwkv7") else None
    uncounted = time // CHUNK * H * CHUNK**3 + by_channel * time * H * 2 * 2 * 4.5 * K
    made = counted(
        lambda: gdn._forward._init_fn(*inputs, r, None, random(1, H, K, V), 1.0, by_channel, CHUNK),
        {torch.ops.aten.baddbmm_: in_place},
    )
    assert made + uncounted == T * recurrence_of(mixer, num_heads=H, key_head_dim=K, value_head_dim=V)


@pytest.mark.parametrize("groups", [1, 3])
def test_chunks_of_ssd(groups):
    inputs = random(1, T, groups, K), random(1, T, groups, K), random(1, T, H, V), -random(1, T, H).abs()
    made = counted(lambda: ssd._forward._init_fn(*inputs, None, random(1, H, V, K), CHUNK))
    assert made == T * recurrence_of("mamba2", num_heads=H, n_groups=groups, state_size=K, head_dim=V)


@pytest.mark.parametrize("rank", [1, 3])
def test_chunks_of_mamba3(rank):
    """The SSD of all inputs; then each query meets the token's own inputs, and the earlier ones that come after it."""
    pairs = rank * rank + rank * (rank - 1) // 2
    time = CHUNK * rank
    inputs = random(1, time, H, K), random(1, time, H, K), random(1, time, H, V), -random(1, time, H).abs()
    made = counted(lambda: ssd._forward._init_fn(*inputs, None, random(1, H, V, K), CHUNK))
    own = recurrence_of("mamba3", num_heads=H, state_size=K, head_dim=V, mimo_rank=rank)
    assert made + CHUNK * pairs * 2 * H * (K + V) == CHUNK * own


def test_a_recurrent_mixer_counts_its_recurrence():
    config = config_of("gdn2.llama")
    parts = model_of(config).forward_flops(T)
    assert parts["recurrence"] == recurrence_of("gdn", **vars(config.options(0)))
    assert model_of(config).forward_flops(16)["recurrence"] < parts["recurrence"]  # one short chunk


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_by_the_names_that_torch_gives(name, gpu):
    assert flops.peak_flops(name, torch.bfloat16) == flops.GPUS[gpu].bf16 * 1e12
    assert flops.peak_flops(name, torch.float32) == flops.GPUS[gpu].fp32 * 1e12


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L40", "NVIDIA A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
    ],
)
def test_devices_that_are_not_known(name):
    assert flops.peak_flops(name, torch.bfloat16) is None
    assert flops.peak_flops("NVIDIA H100 80GB HBM3", torch.float64) is None


class Alive(TorchDispatchMode):
    """Records storages made while it is active, without keeping them alive; not weights, which only get views."""

    def __init__(self, block):
        super().__init__()
        self.weights, self.made = {x.untyped_storage()._cdata for x in block.parameters()}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.weights:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self):
        return sum(size for storage, size in self.made.values() if not storage.expired())


def run_of(seq_len, device="auto", **parallel):
    text, train = {"sources": {"a": {"path": "a"}}}, {"batch_size": 8, "precision": "bf16", "device": device}
    return resolve(merge(OF_TEXT, {"text": text, "data": {"seq_len": seq_len}, "train": train, "parallel": parallel}))


@pytest.mark.every(5)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "name",
    [
        "llama+canon",
        "gla5+canon",
        "gdn2+canon",
        "mamba2+canon",
        "kda+canon",
        "deltaproduct2+canon",
        "rwkv7+canon",
        "mamba3+canon",
    ],
)
def test_activation_memory_equals_the_measured_one(name, checkpointing, monkeypatch):
    """Measured in another way: the tensors of a real bfloat16 forward that are alive after it."""
    seq_len, config = 512, config_of(name, hidden_size=128, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    block = DecoderLayer(config, 0).to(torch.bfloat16)
    forward = block.forward
    if checkpointing != "none":
        forward = recomputed(forward, selective=checkpointing == "selective")
    rotary = rotary_table(torch.arange(seq_len)[None], config.rope_dim, config.rope_theta, torch.bfloat16)
    with Alive(block) as alive, torch.autocast("cpu", torch.bfloat16):
        h = torch.randn(2, seq_len, 128, dtype=torch.bfloat16).requires_grad_()
        y, *_ = forward(h, Layout(), None, rotary)
    held = alive.bytes() - y.nbytes
    monkeypatch.setattr(mixers.gdn, "CPU_CHUNK", CHUNK)  # this forward runs on a CPU
    run = run_of(seq_len, "cpu", activation_checkpointing=checkpointing)
    device = memory.Device(model_of(config), run, devices=2)
    device.memory(1)
    [(estimate, everything)] = device.kept.values()
    assert 2 * estimate == pytest.approx(held, rel=0.05)
    assert (estimate == everything) == (checkpointing == "none")


def test_canonized_blocks_keep_the_inputs_of_their_canon_layers():
    with torch.device("meta"):
        plain, canonized = (
            memory.Device(build(arch, SMALL), run_of(64), devices=2) for arch in ("hf:llama", "hf:llama+canon=AC")
        )
    for device in (plain, canonized):
        device.memory(1)
    [(fewer, _)], [(more, _)] = plain.kept.values(), canonized.kept.values()
    assert more - fewer == 2 * 64 * SMALL.hidden_size * 2  # two of them, in bfloat16


def test_attention_residuals_keep_two_outputs_of_a_block():
    plain, ours = (
        memory.Device(model_of(config), run_of(64, activation_checkpointing="full"), devices=2)
        for config in map(config_of, ("llama", "llama+attnres"))
    )
    for device in (plain, ours):
        device.memory(1)
    kept = {estimate for estimate, _ in ours.kept.values()}
    assert kept == {2 * estimate for estimate, _ in plain.kept.values()}


@pytest.mark.slow
def test_the_compiler_saves_less():
    config = config_of("llama+canon", hidden_size=128, num_hidden_layers=1)
    eager = run_of(256, "cpu")
    compiled = eager.model_copy(update={"train": eager.train.model_copy(update={"compile": True})})
    parallel = [compiled.parallel.model_copy(update={"activation_checkpointing": share}) for share in (0.9, 0.5)]
    kept = []
    for run in (eager, compiled, *(compiled.model_copy(update={"parallel": layout}) for layout in parallel)):
        device = memory.Device(model_of(config), run, devices=2)
        device.memory(1)
        kept += device.kept.values()
    (by_eager, _), (by_compiler, _), *shares = kept
    assert 0.5 * by_eager < by_compiler < 0.95 * by_eager
    assert 0.5 * by_compiler < shares[0][0] <= 0.9 * by_compiler
    assert 0 < shares[1][0] <= 0.5 * by_compiler
    assert {everything for _, everything in shares} == {by_compiler}


def test_memory_of_a_layout_by_hand():
    config = config_of("llama", num_hidden_layers=3, vocab_size=96)
    run = run_of(64)
    parameters = CanonLMForCausalLM(config).num_parameters()
    alone, eight = (memory.Device(model_of(config), run, devices).memory(1) for devices in (1, 8))
    assert alone.parameters == alone.gradients == alone.optimizer / 2 == 4 * parameters
    assert eight.parameters == eight.gradients == alone.parameters / 8
    for micro_batch in (1, 2):  # each reduces its gradients to shards
        assert memory.Device(model_of(config), run, 4).memory(micro_batch).gradients == parameters
    replicated = memory.Device(model_of(config), run_of(64, dp_replicate=4), 8).memory(1)
    assert replicated.optimizer == alone.optimizer / 2
    cut = memory.Device(model_of(config), run_of(64, tp=2), 8)
    norms = 64 * (2 * 3 + 1)  # whole on every device of a tensor-parallel group, then sharded
    assert cut.windows == 2
    assert cut.memory(2).parameters == (4 * (parameters - norms) / 2 + 4 * norms) / 4

"""vLLM's tokens and log-probabilities are transformers' own, or it refuses the model in one line."""

import gc
import json

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPTS = [[i * 7 % 120 + 1 for i in range(length)] for length in (3, 17, 40)]


@pytest.fixture
def serve(models, monkeypatch):
    """Starts vLLM with a model, in this process unless told otherwise."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def start(name, *, apart=False, **options):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(apart)))
        return LLM(
            str(models / name), trust_remote_code=True, dtype="float32", max_model_len=128, max_num_seqs=4,
            **{"enforce_eager": True, **options},
        )  # fmt: skip

    yield start
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("qk_norm", {}),
        ("rope", {}),
        ("tied", {}),
        ("converted", {}),
        ("qk_norm", {"apart": True, "enforce_eager": False}),  # vLLM's defaults: compiled, in a process of its own
    ],
)
def test_tokens_are_those_of_transformers(models, serve, name, options):
    llm = serve(name, **options)
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    written = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    expected = json.loads((models / name / "expected.json").read_text())
    for output, (tokens, logprobs) in zip(written, expected, strict=True):
        assert list(output.outputs[0].token_ids) == tokens
        got = [step[token].logprob for token, step in zip(tokens, output.outputs[0].logprobs, strict=True)]
        assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("canon", r"^canon_set: expected no Canon layers under vLLM, .*, got \['', 'B'\]$"),
        ("recurrent", r"^mixers: expected attention in all layers under vLLM, .*, got \['attention', 'gdn'\]$"),
        ("experts", r'^mlp: expected "gated", "standard" or "none" under vLLM, .*, got "moe"$'),
        ("alibi", r'^attn_implementation: expected "sdpa" or "eager" with alibi, .*, got "vllm"$'),
        ("canonized", "architectures|CanonHost"),  # vLLM's own words
    ],
)
def test_what_vllm_has_no_place_for_is_refused(serve, name, message):
    with pytest.raises(ValueError, match=message):
        serve(name)


def test_tensor_parallelism_is_refused(serve, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # one process each: else it wants two NUMA nodes
    with pytest.raises(RuntimeError):  # of the process that waits for the two
        serve("llama", apart=True, tensor_parallel_size=2)
    output = capfd.readouterr()
    assert "tensor_parallel_size: expected 1" in output.out + output.err

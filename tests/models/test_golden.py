"""Numbers of the original release, reproduced: logits, loss, gradients, generation, padding, packing.

`tests/golden` holds small cases recorded from the published classes: their configuration and weights, then
what they computed. A larger set beside the repository runs too, where there is one. Double precision is held to 1e-7
although the tables allow for more: nothing of ours is in float32 there.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from canonlm.models.published import build, export

CARRIED = Path(__file__).parents[1] / "golden"
BESIDE = Path(__file__).parents[3] / "shared" / "golden"


def recorded_cases(section: str = ""):
    """Run a test on every case that records this section."""
    found = []
    for folder, marks in ((CARRIED, ()), (BESIDE, pytest.mark.slow)):
        for path in sorted(folder.glob("llama_hf_*.json")):
            with safe_open(path.with_suffix(".safetensors"), "pt") as tensors:
                if any(key.startswith(section) for key in tensors.keys()):  # noqa: SIM118 (no mapping)
                    found.append(pytest.param(path, id=f"{folder.parent.name}-{path.stem}", marks=marks))
    return pytest.mark.parametrize("case", found, indirect=True)


class Case:
    """One recorded case, and how close we must come in the precision `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype):
        self.info = json.loads(path.read_text())
        self.tensors = load_file(path.with_suffix(".safetensors"))
        self.state = self.part("param")
        self.model = build(self.info["config"], self.state).to(dtype)
        self.model.generation_config.eos_token_id = None
        tolerance, double = self.info["tolerance"], dtype == torch.float64
        self.double = double
        # The generation, padding and packing truths are float32 in every case.
        self.atol32 = tolerance["suggested_fp32_logits_atol"]
        self.atol = 1e-7 if double and "logits64" in self.tensors else self.atol32
        self.loss_atol = 1e-7 if double and "loss64" in self.tensors else tolerance["suggested_loss_atol"]
        self.grad_rel = tolerance["suggested_grad_rel"]

    def part(self, name: str) -> dict[str, torch.Tensor]:
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def best(self, name: str) -> torch.Tensor:
        """In double precision, or else the recording nearest to it."""
        names = [f"{name}64", name] if self.double or name not in self.tensors else [name]
        return next(self.tensors[key] for key in names if key in self.tensors)

    def logits(self, input_ids, **kwargs):
        with torch.no_grad():
            return self.model(input_ids, **kwargs).logits


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def case(request, dtype):
    return Case(request.param, dtype)


def near(got, expected, atol):
    assert_close(got, expected, atol=atol, rtol=0, check_dtype=False)


@recorded_cases()
def test_logits(case):
    near(case.logits(case.tensors["input_ids"]), case.best("logits"), case.atol)


@recorded_cases("loss")
def test_loss_and_gradients(case):
    input_ids = case.tensors["input_ids"]
    loss = case.model(input_ids, labels=input_ids).loss
    near(loss[None], case.best("loss"), case.loss_atol)
    names, parameters = zip(*case.model.named_parameters(remove_duplicate=False), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    _, theirs = export(case.model, dict(zip(names, gradients, strict=True)), **case.info["config"])
    tied = {"lm_head.weight"} if case.model.config.tie_word_embeddings else set()
    assert case.info["grad_norms"].keys() == case.state.keys() - tied
    for name, norm in case.info["grad_norms"].items():
        assert theirs[name].norm().item() == pytest.approx(norm, rel=case.grad_rel), name
    for name, gradient in case.tensors.items():
        if name.startswith("grad."):
            near(theirs[name.removeprefix("grad.")], gradient, case.grad_rel * gradient.abs().max().item())


@recorded_cases("gen.")
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generation(case, cache):
    check_generation(case, case.part("gen"), cache)


@recorded_cases("gen_short.")
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generation_from_a_prompt_shorter_than_the_kernel(case, cache):
    check_generation(case, case.part("gen_short"), cache)


def check_generation(case, recorded, cache):
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    output = case.model.generate(
        recorded["prompt"],
        max_new_tokens=recorded["tokens"].shape[1],
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    assert torch.equal(output.sequences[:, recorded["prompt"].shape[1] :], recorded["tokens"])
    near(torch.stack(output.logits, dim=1), recorded["logits"], case.atol32)


@recorded_cases("leftpad")
def test_left_padding(case):
    recorded = case.part("leftpad")
    mask = recorded["attention_mask"]
    for kwargs in ({}, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
        logits = case.logits(recorded["input_ids"], attention_mask=mask, **kwargs)
        for row in range(len(mask)):
            near(logits[row, mask[row] != 0], recorded[f"row{row}.logits"][0], case.atol32)


@recorded_cases("packed")
@pytest.mark.parametrize("told", ["doc_ids", "position_ids"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("ones", [True, False])
def test_packing(case, told, use_cache, ones):
    recorded = case.part("packed")
    lengths = recorded["doc_lengths"].tolist()
    if told == "doc_ids":
        kwargs = {told: torch.repeat_interleave(torch.arange(len(lengths)), recorded["doc_lengths"])[None]}
    else:
        kwargs = {told: torch.cat([torch.arange(length) for length in lengths])[None]}
    if ones:
        kwargs["attention_mask"] = torch.ones_like(recorded["input_ids"])
    logits = case.logits(recorded["input_ids"], use_cache=use_cache, **kwargs)
    for idx, part in enumerate(logits.split(lengths, dim=1)):
        near(part, recorded[f"doc{idx}.logits"], case.atol32)


@recorded_cases("hidden")
def test_hidden_states(case):
    recorded = case.part("hidden")
    hidden = case.model(case.tensors["input_ids"], output_hidden_states=True).hidden_states
    assert len(hidden) == len(recorded) == case.info["config"]["num_hidden_layers"] + 1
    for idx, value in enumerate(hidden):
        near(value, recorded[f"{idx}"], case.atol32)


@recorded_cases()
def test_export_is_the_inverse(case):
    params, state = export(case.model.float(), **case.info["config"])
    assert_close(state, case.state, atol=0, rtol=0)
    assert_close(build(params, state).state_dict(), case.model.state_dict(), atol=0, rtol=0)


@recorded_cases()
@pytest.mark.parametrize("dtype", [torch.float32], indirect=True)
def test_bfloat16_is_as_good_as_the_release(case):
    """Our own rounding points, so no equality; but no further from the truth than the release's, within a factor."""
    logits = case.model.to(torch.bfloat16)(case.tensors["input_ids"]).logits
    error = (logits - case.best("logits")).abs().max().item()
    measured = next(value for key, value in case.info["tolerance"].items() if key.startswith("measured_bf16"))
    print(f"{case.info['name']}: bfloat16 error {error:.3f}, the release's {measured:.3f}")
    assert error < 2 * measured


def damaged(**changes):
    info = json.loads((CARRIED / "llama_hf_BD_tied.json").read_text())
    state = {
        key.removeprefix("param."): value
        for key, value in load_file(CARRIED / "llama_hf_BD_tied.safetensors").items()
        if key.startswith("param.")
    }
    for key, value in changes.pop("state", {}).items():
        if value is None:
            del state[key]
        else:
            state[key] = value
    return {**info["config"], **changes}, state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "LamaCanon"}, r'unknown model_type "LamaCanon"\. Did you mean "LlamaCanon"\?'),
        ({"colour": 1, "smell": 2}, r"params: unknown colour, smell"),
        ({"canon_bias": True}, r"params\.canon_bias: expected False, got True"),
        ({"rope_scaling": {"factor": 2}}, r"params\.rope_scaling: expected None"),
        ({"rope_version": "other"}, r'params\.rope_version: expected "lingua" or "huggingface", got "other"'),
        ({"partial_rotary_factor": 0.5}, r"params\.partial_rotary_factor: expected rope_dim to go with it, got 0\.5"),
        ({"state": {"model.norm.weight": None}}, r"state: missing model\.norm\.weight$"),
        (
            {"state": {"extra": torch.zeros(1), "model.norm.weight": torch.zeros(7)}},
            r"state: unknown extra; model\.norm\.weight is \(7,\), not \(32,\)$",
        ),
        ({"state": {"lm_head.weight": torch.zeros(97, 32)}}, r"lm_head\.weight differs from .*, although tied$"),
        ({"tie_word_embeddings": False, "state": {"lm_head.weight": None}}, r"state: missing lm_head\.weight$"),
        (
            {"canon_set": "D"},
            r"state: unknown model\.layers\.0\.self_attn\.canonB\.weight; unknown .*1.*canonB\.weight$",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_a_list(changes, message):
    with pytest.raises(ValueError, match=message):
        build(*damaged(**changes))


@pytest.mark.parametrize("changes", [{}, {"state": {"lm_head.weight": None}}], ids=["twice", "once"])
def test_a_tied_head_may_be_given_twice_and_stays_tied(changes):
    model = build(*damaged(**changes))
    assert model.lm_head.weight is model.model.embed_tokens.weight

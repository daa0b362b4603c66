"""Numbers of the original release, reproduced: logits, loss, gradients, generation, padding, packing.

`tests/golden` has small cases recorded from the published classes: their configuration, weights and results. If there
is a larger set beside the repository, it runs too. The tolerance in double precision is 1e-7, although the tables allow
more, because nothing of ours is in float32 there.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from canonlm.models.published import build, export
from canonlm.models.published.checkpoint import parse

CARRIED = Path(__file__).parents[1] / "golden"
BESIDE = Path(__file__).parents[3] / "shared" / "golden"
FORMATS = ("config", "lingua_args", "hf_equivalent_config")


@functools.cache
def recorded():
    """(path, marks, number of formats of the configuration, names of tensors) of every case."""
    cases = []
    for folder, marks in ((CARRIED, ()), (BESIDE, pytest.mark.slow)):
        for path in sorted(folder.glob("*.safetensors")):
            info = json.loads(path.with_suffix(".json").read_text())
            with safe_open(path, "pt") as tensors:
                cases.append((path, marks, sum(key in info for key in FORMATS), tensors.keys()))
    return cases


def recorded_cases(section: str = "", formats: int = 1):
    """Run a test on every case with this section, and with its configuration in this number of formats or more."""
    collected = [
        pytest.param(path, id=f"{path.parent.parent.name}-{path.stem}", marks=marks)
        for path, marks, number, names in recorded()
        if number >= formats and any(name.startswith(section) for name in names)
    ]
    return pytest.mark.parametrize("case", collected, indirect=True)


in_float32, in_float64 = (
    pytest.mark.parametrize("dtype", [dtype], indirect=True) for dtype in (torch.float32, torch.float64)
)


class Case:
    """One recorded case, and the tolerance in the precision `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype):
        self.info = json.loads(path.with_suffix(".json").read_text())
        self.tensors = load_file(path)
        self.state = self.part("param")
        self.lingua = "config" not in self.info
        self.params = self.info["lingua_args" if self.lingua else "config"]
        self.model = build(self.params, self.state).to(dtype)
        self.model.generation_config.eos_token_id = None
        tolerance, double = self.info["tolerance"], dtype == torch.float64
        self.double = double
        # The generation, padding and packing references are float32 in every case.
        self.atol32 = tolerance["suggested_fp32_logits_atol"]
        self.atol = 1e-7 if double and "logits64" in self.tensors else self.atol32
        self.loss_atol = 1e-7 if double and "loss64" in self.tensors else tolerance["suggested_loss_atol"]
        self.grad_rel = tolerance["suggested_grad_rel"]

    def part(self, name: str) -> dict[str, torch.Tensor]:
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def best(self, name: str) -> torch.Tensor:
        """The recording in double precision, or else the nearest to it."""
        names = [f"{name}64", name] if self.double or name not in self.tensors else [name]
        return next(self.tensors[key] for key in names if key in self.tensors)

    def export(self, tensors=None):
        return export(self.model, tensors, lingua=self.lingua, **self.params)

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


@recorded_cases("logits")
def test_logits(case):
    near(case.logits(case.tensors["input_ids"]), case.best("logits"), case.atol)


@recorded_cases("loss")
def test_loss_and_gradients(case):
    input_ids = case.tensors["input_ids"]
    loss = case.model(input_ids, labels=input_ids).loss
    near(loss[None], case.best("loss"), case.loss_atol)
    names, parameters = zip(*case.model.named_parameters(remove_duplicate=False), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    _, theirs = case.export(dict(zip(names, gradients, strict=True)))
    without = {name for name in case.state if not theirs[name].any()}  # parameters that nothing reads
    if case.model.config.tie_word_embeddings:
        without.add("output.tied_module.weight" if case.lingua else "lm_head.weight")
    assert case.info["grad_norms"].keys() == case.state.keys() - without
    for name, norm in case.info["grad_norms"].items():
        assert theirs[name].norm().item() == pytest.approx(norm, rel=case.grad_rel), name
    for name, gradient in case.tensors.items():
        if name.startswith("grad."):
            near(theirs[name.removeprefix("grad.")], gradient, case.grad_rel * gradient.abs().max().item())


@pytest.mark.every(5)
@recorded_cases("gen.")
@in_float64
def test_generation(case):
    check_generation(case, case.part("gen"), "static")


@pytest.mark.every(5)
@recorded_cases("gen_short.")
@in_float32
def test_generation_from_a_prompt_shorter_than_the_kernel(case):
    check_generation(case, case.part("gen_short"), "dynamic")


def check_generation(case, recorded, cache):
    """With one kind of cache: test_decoding.py compares the kinds, and no cache."""
    output = case.model.generate(
        recorded["prompt"],
        max_new_tokens=recorded["tokens"].shape[1],
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        cache_implementation=cache,
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


@pytest.mark.every(5)
@recorded_cases("packed")
@pytest.mark.parametrize(
    ("document_form", "use_cache", "ones", "dtype"),
    [("doc_ids", True, True, torch.float32), ("position_ids", False, False, torch.float64)],
    indirect=["dtype"],
)
def test_packing(case, document_form, use_cache, ones):
    recorded = case.part("packed")
    lengths = recorded["doc_lengths"].tolist()
    if document_form == "doc_ids":
        kwargs = {document_form: torch.repeat_interleave(torch.arange(len(lengths)), recorded["doc_lengths"])[None]}
    else:
        kwargs = {document_form: torch.cat([torch.arange(length) for length in lengths])[None]}
    if ones:
        kwargs["attention_mask"] = torch.ones_like(recorded["input_ids"])
    logits = case.logits(recorded["input_ids"], use_cache=use_cache, **kwargs)
    for idx, part in enumerate(logits.split(lengths, dim=1)):
        near(part, recorded[f"doc{idx}.logits"], case.atol32)


@recorded_cases("hidden")
def test_hidden_states(case):
    recorded = case.part("hidden")
    hidden = case.model(case.tensors["input_ids"], output_hidden_states=True).hidden_states
    assert len(hidden) == len(recorded) == case.model.config.num_hidden_layers + 1
    for idx, value in enumerate(hidden):
        near(value, recorded[f"{idx}"], case.atol32)


@recorded_cases()
@in_float32
def test_export_is_the_inverse(case):
    params, state = case.export()
    assert_close(state, case.state, atol=0, rtol=0)
    assert_close(build(params, state).state_dict(), case.model.state_dict(), atol=0, rtol=0)


@recorded_cases(formats=2)
@in_float32
def test_arguments_of_the_training_run_give_the_same_config(case):
    """Checked with the release's own conversion between its two formats, for the linear families and some Llamas."""
    ours = parse(case.info["lingua_args"]).release().dump()
    theirs = parse(case.info["hf_equivalent_config" if case.lingua else "config"]).dump()
    of_the_case = {"time_step_rank", *case.info.get("config_overrides_after_build", {})}
    assert {key: ours[key] for key in ours.keys() - of_the_case} == {
        key: theirs[key] for key in theirs.keys() - of_the_case
    }


@recorded_cases("logits")
@in_float32
def test_bfloat16_is_as_good_as_the_release(case):
    """We round at other points, so results differ; but errors are those of the release, within a factor."""
    logits = case.model.to(torch.bfloat16)(case.tensors["input_ids"]).logits
    error = (logits - case.best("logits")).abs().max().item()
    measured = next(value for key, value in case.info["tolerance"].items() if key.startswith("measured_bf16"))
    print(f"{case.info['name']}: bfloat16 error {error:.3f}, the release's {measured:.3f}")
    assert error < 2 * measured

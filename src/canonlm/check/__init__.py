"""Checks that a causal language model of transformers gives the same output with caches, padding, batches and beams.

    from canonlm import check
    for outcome in check.decoding(model):
        print(outcome)

    @pytest.mark.parametrize("case", check.CASES)
    def test_decoding(model, case):
        [outcome] = check.decoding(model, [case])
        assert outcome.state != "differs", outcome

The reference is one forward over one row, without cache, padding or batch. Every case computes the same output in
another way: with a cache, in a batch, padded, in pieces, with beams, and so on.
"""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from canonlm.check.cases import CASES
from canonlm.check.truth import Outcome, Subject
from canonlm.errors import unknown
from canonlm.models.untouched import keeping_modes, without_settings

__all__ = ["CASES", "Outcome", "decoding"]


def decoding(model: PreTrainedModel, cases: Iterable[str] | None = None, *, seed: int = 0) -> list[Outcome]:
    """An outcome for each case, in order; by default for all cases.

    The model's device, weights, mode and settings do not change. seed: of the input tokens. ValueError for an unknown
    case.
    """
    chosen = list(CASES if cases is None else cases)
    for name in chosen:
        if name not in CASES:
            raise unknown("case", name, CASES)
    outcomes = []
    devices = [model.device] if model.device.type == "cuda" else []
    with keeping_modes(model):
        for name in chosen:
            subject = Subject(without_settings(model.eval()), seed)
            with torch.random.fork_rng(devices):
                outcomes.append(_outcome(name, subject))
    return outcomes


def _outcome(name: str, subject: Subject) -> Outcome:
    case = CASES[name]
    try:
        error = case.run(subject)
    except Exception as refusal:  # other people's code: whatever it raises, an exception is not a wrong answer
        reason = " ".join(str(refusal).split())[:200]
        return Outcome(name, "refused", None, f"{type(refusal).__name__}: {reason}")
    limit = case.limit or subject.limit
    return Outcome(name, "passed" if error <= limit else "differs", error, f"limit {limit:g}")

"""Checks that a causal language model of transformers gives the same output with caches, padding, batches and beams.

    from canonlm import check
    for outcome in check.decoding(model):
        print(outcome)

    @pytest.mark.parametrize("case", check.CASES)
    def test_decoding(model, case):
        [outcome] = check.decoding(model, [case])
        assert outcome.state in ("passed", "refused"), outcome

The reference is one forward over one row, without cache, padding or batch. Every case computes the same output in
another way: with a cache, in a batch, padded, in pieces, with beams, and so on.
"""

import linecache
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary, extract_tb

import torch
import transformers
from transformers import PreTrainedModel

import canonlm
from canonlm.canonize.check.cases import CASES
from canonlm.canonize.check.reference import Outcome, Subject
from canonlm.core.borrowed import keeping_modes, without_settings
from canonlm.core.errors import Unsupported, brief, unknown

__all__ = ["CASES", "Outcome", "complaints", "decoding"]

_LIBRARY, _OURS = (f"{Path(str(package.__file__)).parent}/" for package in (transformers, canonlm))
_INSTALLED = (_OURS, "<", *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")))


def decoding(model: PreTrainedModel, cases: Iterable[str] | None = None, *, seed: int = 0) -> list[Outcome]:
    """An outcome for each case, in order; by default for all cases.

    The model's device, weights, mode and settings do not change. seed: of the input tokens. ValueError for an unknown
    case.
    """
    chosen = list(CASES if cases is None else cases)
    for name in chosen:
        if name not in CASES:
            raise unknown("case", name, CASES)
    devices = [model.device] if model.device.type == "cuda" else []
    outcomes = []
    with keeping_modes(model):
        for name in chosen:
            model.eval()
            with torch.random.fork_rng(devices):
                outcomes.append(_outcome(name, without_settings(model), seed))
    return outcomes


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """The faults in words; empty if nothing is. A model that refuses more than half of the cases is not checked."""
    wrong, failed, refused = (
        [each.case for each in outcomes if each.state == state] for state in ("differs", "failed", "refused")
    )
    texts = []
    if wrong:
        texts.append(f"wrong answers without an error: {', '.join(wrong)}")
    if failed:
        texts.append(f"errors in the model's code: {', '.join(failed)}")
    if 2 * (len(refused) + len(failed)) > len(outcomes):
        ran = len(outcomes) - len(refused) - len(failed)
        texts.append(f"not checked, as only {ran} of {len(outcomes)} cases ran")
    return texts


def _outcome(name: str, model: PreTrainedModel, seed: int) -> Outcome:
    case = CASES[name]
    try:
        subject = Subject(model, seed)
        error = case.run(subject)
    except (Exception, SystemExit) as raised:  # other people's code may raise anything, or end the process
        reason = f"{type(raised).__name__}: {brief(' '.join(str(raised).split()), 200)}"
        if _is_refusal(raised):
            return Outcome(name, "refused", None, reason)
        return Outcome(name, "failed", None, f"{_place(raised)}: {reason}")
    limit = case.limit or subject.limit
    return Outcome(name, "passed" if error <= limit else "differs", error, f"limit {limit:g}")


def _is_refusal(raised: BaseException) -> bool:
    """Whether an error says that a use is not supported: one of ours, or a `raise` of the library outside models."""
    last = extract_tb(raised.__traceback__)[-1]
    raises = linecache.getline(last.filename, last.lineno or 0).lstrip().startswith("raise ")
    of_library = last.filename.startswith(_LIBRARY) and not last.filename.startswith(f"{_LIBRARY}models/")
    return isinstance(raised, Unsupported) or (of_library and raises)


def _place(raised: BaseException) -> str:
    """The innermost line of code that is not part of an installed package, else of a model of the library or of ours,
    else of any."""
    frames = extract_tb(raised.__traceback__)
    check = f"{_OURS}canonize/check/"

    def own(frame: FrameSummary) -> bool:
        return not frame.filename.startswith(_INSTALLED)

    def of_model(frame: FrameSummary) -> bool:
        return frame.filename.startswith((f"{_LIBRARY}models/", _OURS)) and not frame.filename.startswith(check)

    frame = next(match for belongs in (own, of_model, bool) for match in reversed(frames) if belongs(match))
    file = Path(frame.filename)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{frame.lineno}"

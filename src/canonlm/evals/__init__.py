"""How a model is asked what a task wants to know: `Task.evaluation` says it."""

from typing import Any, Protocol

import torch

from canonlm import outside
from canonlm.data.windows import WindowStream
from canonlm.errors import unknown
from canonlm.evals.generate import GenerateEval
from canonlm.evals.windows import WindowEval

KINDS = {"windows": WindowEval, "generate": GenerateEval}  # those that any task can name


class Evaluation(Protocol):
    """Asked again and again during a run, always the same: `size` windows, instances, sentences or people."""

    def run(self, model: Any, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices": [{"slice", "correct", "total"}, …], "measures": {name: number}}`"""
        ...


def build(stream: WindowStream, size: int, batch_size: int) -> Evaluation:
    """The evaluation that the stream's task asks for: a kind, a class (or function) that is called like one of them, or
    where to find it, as `package.module:Name`."""
    kind = type(stream.task).evaluation
    if isinstance(kind, str):
        if not outside.is_reference(kind) and kind not in KINDS:
            raise unknown("evaluation", kind, KINDS)
        kind = KINDS[kind] if kind in KINDS else outside.load(kind).object
    return kind(stream, size, batch_size)

"""How a model is asked what a task wants to know: one evaluation per kind of task (`Task.evaluation`)."""

from typing import Any, Protocol

import torch

from canonlm.windows import WindowStream


class Evaluation(Protocol):
    """Asked again and again during a run, always the same: `size` windows, instances, sentences or people."""

    def run(self, model: Any, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices": [{"slice", "correct", "total"}, …], "measures": {name: number}}`"""
        ...


def build(stream: WindowStream, size: int, batch_size: int) -> Evaluation:
    """The evaluation that the stream's task asks for."""
    from canonlm.evals.facts import FactEval
    from canonlm.evals.generate import GenerateEval
    from canonlm.evals.sentences import SentenceEval
    from canonlm.evals.windows import WindowEval

    kinds = {"windows": WindowEval, "generate": GenerateEval, "sentences": SentenceEval, "facts": FactEval}
    return kinds[stream.task.evaluation](stream, size, batch_size)

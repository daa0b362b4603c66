"""How a model is asked what a task wants to know: one evaluation per kind of task (`Task.evaluation`)."""

from importlib import import_module
from typing import Any, Protocol

import torch

from canonlm.data.windows import WindowStream

KINDS = {
    "windows": ("canonlm.evals.windows", "WindowEval"),
    "generate": ("canonlm.evals.generate", "GenerateEval"),
    "sentences": ("canonlm.evals.sentences", "SentenceEval"),
    "facts": ("canonlm.evals.facts", "FactEval"),
}


class Evaluation(Protocol):
    """Asked again and again during a run, always the same: `size` windows, instances, sentences or people."""

    def run(self, model: Any, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices": [{"slice", "correct", "total"}, …], "measures": {name: number}}`"""
        ...


def build(stream: WindowStream, size: int, batch_size: int) -> Evaluation:
    """The evaluation that the stream's task asks for."""
    module, name = KINDS[stream.task.evaluation]
    return getattr(import_module(module), name)(stream, size, batch_size)

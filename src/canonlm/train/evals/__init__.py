"""Evaluations during training. `Task.evaluation` chooses one."""

import json
from typing import Any, Protocol

import torch

from canonlm.core import user_code
from canonlm.core.errors import unknown
from canonlm.data.windows import WindowStream
from canonlm.runs.rows import MAX_LINE
from canonlm.tasks.tally import Tally
from canonlm.train.evals.generate import GenerateEval
from canonlm.train.evals.windows import WindowEval

KINDS = {"windows": WindowEval, "generate": GenerateEval}  # those that any task can name


class Evaluation(Protocol):
    """Evaluates `size` windows, instances, sentences or people, always the same ones, several times in a run."""

    def run(self, model: Any, device: torch.device) -> dict[str, Any]:
        """`{"loss", "slices": [{"slice", "correct", "total"}, …], "measures": {name: number}}`"""
        ...


def build(stream: WindowStream, size: int, batch_size: int) -> Evaluation:
    """The evaluation of the stream's task: one of KINDS, a class (or function) with the same arguments, or its name, as
    `package.module:Name`. ValueError: the counts of all slices might not fit in a row of `metrics.jsonl`."""
    slices = Tally(stream.task.slices()).rows()
    if len(json.dumps(slices, default=str)) > MAX_LINE // 2:  # the other half is for the digits of counts
        what = f"slices whose counts fit in a row of {MAX_LINE:,} bytes"
        raise ValueError(f"{stream.task.name}: expected {what}, got {len(slices):,} slices")
    kind = type(stream.task).evaluation
    if isinstance(kind, str):
        if not user_code.is_reference(kind) and kind not in KINDS:
            raise unknown("evaluation", kind, KINDS)
        kind = KINDS[kind] if kind in KINDS else user_code.load(kind).object
    return kind(stream, size, batch_size)

"""Evaluate a saved model on its playground task: at any difficulty, and beyond the length of training.

A model of a task has only the tokens of that task, so another difficulty must have the same vocabulary: true of Depo
with more nodes, not of Mano with longer expressions.

Length: a window holds instances one after the other, so a longer window puts questions at positions that training never
reached. With `lengths=[1, 1.25, 1.5, 2]`, windows have these multiples of the training length; in the longer ones, only
the answers beyond the training length are graded.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from canonlm import tasks
from canonlm.core import user_code
from canonlm.core.errors import expected
from canonlm.core.user_folders import expanded
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.runs.identity import exact
from canonlm.runs.rows import accuracy_of, slice_key
from canonlm.suites.load_model import Subject
from canonlm.suites.questions import Score, not_finite, share_right
from canonlm.suites.settings import PlaygroundSettings
from canonlm.train import evals
from canonlm.train.config import build_task
from canonlm.train.evals.answers import Answer
from canonlm.train.evals.windows import WindowEval

BATCH_SIZE = 32
DEFAULT_LENGTH = 2048  # tokens of a window, if neither a run nor the model has a length


class PlannedEvaluation(NamedTuple):
    """One evaluation: `scores(rows)` gives `accuracy` (the task's headline, then slice by slice), the task's own
    measures, and `loss` (nats per labelled token). It appends every answer to `rows`, as `Results.keep` takes them; an
    evaluation from outside that does not report answers appends none."""

    name: str
    settings: dict[str, Any]
    scores: Callable[..., list[Score]]


def evaluations(
    subject: Subject, settings: PlaygroundSettings, batch_size: int | None = None
) -> list[PlannedEvaluation]:
    """One evaluation for each length.

    ValueError: no such task, another vocabulary than the model's, lengths that are impossible for the task.
    """
    run = subject.run
    with user_code.of_run(expanded(subject.about["source"]), subject.trusted):
        task = _task(subject, settings)
    lengths = sorted(set(settings.lengths))
    if lengths[0] < 1 or (lengths != [1] and not task.in_windows):
        allowed = "numbers >= 1" if task.in_windows else f"[1]: in {task.name} every question stands alone"
        raise expected("lengths", allowed, settings.lengths)
    trained = run.data.seq_len if run else wrap(subject.model).context_length or DEFAULT_LENGTH
    stream = WindowStream(
        task,
        settings.split,
        seed=(run.eval_seed if run else 0) if settings.seed is None else settings.seed,
        seq_len=trained,
        loss_on=run.data.loss_on if run else task.loss_on,
        isolate_documents=bool(run and run.data.isolate_documents),
    )
    batch = batch_size or (run.train.batch_size if run else BATCH_SIZE)
    planned = []
    for length in lengths:
        longer = replace(stream, seq_len=math.ceil(round(length * trained, 6)))
        if longer.seq_len < task.min_seq_len:
            what = f"numbers >= {task.min_seq_len / trained:.3g}, or the questions of {task!r} do not fit"
            raise expected("lengths", what, settings.lengths)
        evaluation: evals.Evaluation = (
            evals.build(stream, settings.n, batch)
            if length == 1
            else WindowEval(longer, settings.n, batch, after=trained)
        )
        noted = {"task": {"name": task.name, **task.spec.model_dump()}, "seq_len": longer.seq_len}
        noted |= {"n": settings.n, "seed": stream.seed, "split": settings.split, "batch_size": batch}
        name = task.name if length == 1 else f"{task.name} x{exact(length)}"
        planned.append(PlannedEvaluation(name, noted, partial(_scores_of, evaluation, subject, task.score.slice)))
    return planned


def _task(subject: Subject, settings: PlaygroundSettings) -> tasks.Task:
    run = subject.run
    trained = run.task if run else None
    if not (trained or settings.task):
        raise expected("task.name", f"one of {', '.join(tasks.names())}: {subject.about['source']} names no task", None)
    chosen = settings.task if "difficulty" in settings.task else {**(trained or {}), **settings.task}
    chosen = {**chosen, "name": chosen.get("name", (trained or {}).get("name"))}
    if trained and chosen["name"] != trained["name"]:
        raise expected("task.name", f"{trained['name']}, which the run was trained on", chosen["name"])
    task = build_task(chosen)
    known = run.built_task.vocab.names if run and run.built_task else None
    if len(task.vocab) != subject.model.config.vocab_size or (
        known is not None and list(task.vocab.names) != list(known)
    ):
        what = f"a difficulty with the {subject.model.config.vocab_size} tokens of the model"
        raise expected("task", what, f"{task!r}: {len(task.vocab)} tokens")
    return task


def _scores_of(
    evaluation: evals.Evaluation, subject: Subject, headline: str, rows: list[dict[str, Any]] | None = None
) -> list[Score]:
    def keep(answer: Answer) -> None:
        row = {"index": len(answers), "slice": answer.slice, "question": answer.question, "answer": answer.answer}
        row |= {"output": answer.model_answer, "right": {"accuracy": answer.correct}}
        answers.append(row if answer.finite else {**row, "finite": False})

    answers = [] if rows is None else rows
    if rows is not None and hasattr(evaluation, "keep"):
        evaluation.keep = keep
    results = evaluation.run(wrap(subject.model), subject.model.device)
    not_finite_counts = results.get("not_finite", {"questions": 0, "asked": 0})
    if not any(row["total"] for row in results["slices"]) and not results.get("measures"):
        seq_len = evaluation.stream.seq_len  # type: ignore[attr-defined]  # only windows may have no complete answer
        raise expected("lengths", "longer ones: no answer is complete beyond the training length", f"{seq_len} tokens")
    counted = [(slice_key(row["slice"]), row) for row in results["slices"] if row["total"]]
    keys = {key for key, _ in counted}
    each = [share_right(accuracy_of(key, keys), row["correct"], row["total"], row["slice"]) for key, row in counted]
    primary = [score for score in each if score.slice.keys() == each[0].slice.keys()]
    primary = [score for score in primary if slice_key(score.slice) == headline or not headline]
    main = []
    if primary:  # the slices of the task's own scale have equal weight, as in the report; or one of them is the score
        value = sum(score.value for score in primary) / len(primary)
        error = math.sqrt(sum((score.stderr or 0) ** 2 for score in primary)) / len(primary)
        main = [Score("accuracy", value, error, sum(score.n or 0 for score in primary))]
        each = each if keys != {"all"} else []
    measures = [
        Score(name, float(value), None, None, share=False) for name, value in results.get("measures", {}).items()
    ]
    loss = Score("loss", results["loss"], None, None, higher_is_better=False, share=False)
    return [*main, *each, *measures, loss, *not_finite(not_finite_counts["questions"], not_finite_counts["asked"])]

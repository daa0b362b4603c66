"""Ask a saved model what a playground task asks: at any difficulty, and beyond the length it was trained at.

A model of a task knows the tokens of that task alone, so another difficulty has to have the same vocabulary: Depo with
more nodes has, Mano with longer expressions has not.

Length: a window holds instances one after the other, so a longer window puts questions at positions that training never
reached. With `lengths=[1, 1.25, 1.5, 2]` windows of so many times the training length are read, and of the longer ones
only the answers beyond the training length are graded.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from canonlm import evals, outside, tasks
from canonlm.data.windows import WindowStream
from canonlm.errors import InvalidSetting, expected
from canonlm.evals.answers import Answer
from canonlm.evals.windows import WindowEval
from canonlm.models.build import wrap
from canonlm.suites.opening import Subject
from canonlm.suites.questions import Score, not_finite, share_right
from canonlm.train.config import RunConfig, Settings
from canonlm.train.recipe import load

BATCH_SIZE = 32
DEFAULT_LENGTH = 2048  # tokens of a window, where neither a run nor the model says


class PlaygroundSettings(Settings):
    """What `canonlm eval --suite playground` takes. `task` changes the task that the run was trained on, setting by
    setting; a model that is no run of ours needs it whole."""

    task: dict[str, Any] = {}
    lengths: list[float] = Field([1], min_length=1)  # of windows, in training lengths
    n: PositiveInt = 500  # windows, instances, sentences or people, by task
    seed: NonNegativeInt | None = None  # default: the run's
    split: str = "test"


class Asked(NamedTuple):
    """One evaluation to make: `scores(rows)` gives `accuracy` (of all slices alike, then slice by slice), the task's
    own measures, and `loss` (nats per labelled token). To `rows` it appends every answer, as
    `Results.keep` takes them; an evaluation from outside, which does not tell them, appends none."""

    name: str
    settings: dict[str, Any]
    scores: Callable[..., list[Score]]


def evaluations(subject: Subject, settings: PlaygroundSettings, batch_size: int | None = None) -> list[Asked]:
    """One for each length.

    ValueError: no such task, another vocabulary than the model's, lengths that the task cannot be asked at.
    """
    source = Path(subject.about["source"])
    with outside.of_run(source, subject.trusted):
        run = load(source / "config.yaml") if (source / "config.yaml").is_file() else None
        task = _task(subject, run, settings)
    lengths = sorted(set(settings.lengths))
    if lengths[0] < 1 or (lengths != [1] and task.evaluation != "windows"):
        allowed = "numbers >= 1" if task.evaluation == "windows" else f"[1]: in {task.name} every question stands alone"
        raise expected("lengths", allowed, settings.lengths)
    trained = run.data.seq_len if run else wrap(subject.model).context_length or DEFAULT_LENGTH
    stream = WindowStream(
        task,
        settings.split,
        seed=(run.train.seed if run else 0) if settings.seed is None else settings.seed,
        seq_len=trained,
        loss_on=run.data.loss_on if run else task.loss_on,
        isolate_documents=bool(run and run.data.isolate_documents),
    )
    batch = batch_size or (run.train.batch_size if run else BATCH_SIZE)
    found = []
    for length in lengths:
        longer = replace(stream, seq_len=math.ceil(round(length * trained, 6)))
        if longer.seq_len < task.least_seq_len:
            what = f"numbers >= {task.least_seq_len / trained:.3g}, or the questions of {task!r} do not fit"
            raise expected("lengths", what, settings.lengths)
        evaluation: evals.Evaluation = (
            evals.build(stream, settings.n, batch)
            if length == 1
            else WindowEval(longer, settings.n, batch, after=trained)
        )
        noted = {"task": {"name": task.name, **task.spec.model_dump()}, "seq_len": longer.seq_len}
        noted |= {"n": settings.n, "seed": stream.seed, "split": settings.split, "batch_size": batch}
        name = task.name if length == 1 else f"{task.name} x{length:g}"
        found.append(Asked(name, noted, partial(_scores_of, evaluation, subject)))
    return found


def _task(subject: Subject, run: RunConfig | None, settings: PlaygroundSettings) -> tasks.Task:
    trained = run.task if run else None
    if not (trained or settings.task):
        raise expected("task.name", f"one of {', '.join(tasks.names())}: {subject.about['source']} does not say", None)
    chosen = settings.task if "difficulty" in settings.task else {**(trained or {}), **settings.task}
    chosen = {**chosen, "name": chosen.get("name", (trained or {}).get("name"))}
    if trained and chosen["name"] != trained["name"]:
        raise expected("task.name", f"{trained['name']}, which the run was trained on", chosen["name"])
    try:
        task = tasks.get(**chosen)
    except InvalidSetting as error:  # "depo.N": was written as task.N
        raise InvalidSetting(f"task.{error.key.partition('.')[2] or 'name'}", error) from None
    known = run.built_task.vocab.names if run and run.built_task else None
    if len(task.vocab) != subject.model.config.vocab_size or (
        known is not None and list(task.vocab.names) != list(known)
    ):
        what = f"a difficulty with the {subject.model.config.vocab_size} tokens that the model knows"
        raise expected("task", what, f"{task!r}: {len(task.vocab)} tokens")
    return task


def _scores_of(evaluation: evals.Evaluation, subject: Subject, rows: list[dict[str, Any]] | None = None) -> list[Score]:
    def keep(answer: Answer) -> None:
        row = {"index": len(kept), "slice": answer.slice, "question": answer.question, "answer": answer.answer}
        row |= {"said": answer.said, "right": {"accuracy": answer.correct}}
        kept.append(row if answer.finite else {**row, "finite": False})

    kept = [] if rows is None else rows
    if rows is not None and hasattr(evaluation, "keep"):
        evaluation.keep = keep
    found = evaluation.run(wrap(subject.model), subject.model.device)
    bad = found.get("not_finite", {"questions": 0, "asked": 0})
    if not any(row["total"] for row in found["slices"]) and not found.get("measures"):
        seq_len = evaluation.stream.seq_len  # type: ignore[attr-defined]  # of windows alone nothing may be complete
        raise expected("lengths", "longer ones: no answer is complete beyond the training length", f"{seq_len} tokens")
    each = [
        share_right("accuracy", row["correct"], row["total"], row["slice"]) for row in found["slices"] if row["total"]
    ]
    primary = [score for score in each if score.slice.keys() == each[0].slice.keys()]
    main = []
    if primary:  # the slices of the task's own scale weigh the same, as in the report
        value = sum(score.value for score in primary) / len(primary)
        error = math.sqrt(sum((score.stderr or 0) ** 2 for score in primary)) / len(primary)
        main = [Score("accuracy", value, error, sum(score.n or 0 for score in primary))]
    measures = [Score(name, float(value), None, None, share=False) for name, value in found.get("measures", {}).items()]
    loss = Score("loss", found["loss"], None, None, higher_is_better=False, share=False)
    return [*main, *each, *measures, loss, *not_finite(bad["questions"], bad["asked"])]

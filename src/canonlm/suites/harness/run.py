"""Evaluates an opened model on tasks of the harness, one after the other."""

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from canonlm.core.errors import InvalidSetting, brief
from canonlm.core.user_folders import expanded
from canonlm.suites.harness import require
from canonlm.suites.harness.opening import SEEDS, Part, find, load, name_of, open_tasks, parts, seed
from canonlm.suites.questions import Score, not_finite
from canonlm.suites.settings import HarnessSettings
from canonlm.train.load_config import is_yours, your_folder

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from canonlm.suites.harness.lm import CanonLM
    from canonlm.suites.load_model import Subject

_log = logging.getLogger(__name__)

PUBLISHED = ["canonlm_standard", "canonlm_retrieval", "canonlm_retrieval_twice", "canonlm_needle"]
"""Groups of the tasks behind the published results."""

BOOTSTRAPS = 1000
"""Resamples for standard errors without a formula (LAMBADA's perplexity); the harness's 100,000 take minutes."""

SHARES = {
    *("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all"),
    *("accuracy", "partial_accuracy", "non_greedy_accuracy"),
    *("prompt_level_strict_acc", "prompt_level_loose_acc", "inst_level_strict_acc", "inst_level_loose_acc"),
    *("exact_match", "em", "f1", "precision", "recall", "contains", "exact", "year", "correct"),
}
"""Measures that are shares of 1; so are those of needles, whose names are lengths."""

_IN_PERCENT = ("squadv2", "scrolls_")
"""Prefixes of the names of tasks whose measures are in percent."""


def refuse_code(planned: Iterable[Any]) -> None:
    """ValueError for task files that may be somebody else's: their functions and templates are programs."""
    for settings in planned:
        for key, name in [("include", settings.include), *(("tasks", name) for name in settings.tasks)]:
            if name is not None and os.path.exists(file := expanded(name)) and not is_yours(file):
                what = f"--trust, as its task files run Python; read them first ({your_folder()} needs no --trust)"
                raise InvalidSetting(key, f"{key}: {brief(name)}: expected {what}")


def run_harness(
    subject: "Subject",
    settings: HarnessSettings,
    on_task: Callable[[str, list[Score]], None] = lambda name, scores: None,
    *,
    done: Collection[str] = (),
    bos: bool = False,
    batch_size: int | None = None,
    beyond: bool = False,
) -> dict[str, list[Score]]:
    """Evaluate every task. Groups without a mean of their own are evaluated task by task.

    A group with a mean, such as `mmlu`, has its own scores first, then its tasks', with the slice `{"task": name}`.
    Measures are the harness's: `acc`, `word_perplexity`, …; `exact_match,strict-match` where answers are read in
    several ways. So are standard errors; None if it has none. If texts were longer than the model's context, the score
    `cut` is the number that lost their beginning; if logits were not finite, `not_finite` is the number of questions.

    Args:
        on_task: called with the name and the scores of each task (or group with a mean), as soon as it is finished.
        done: names that are not evaluated again: `on_task` is called with them, without scores.
        bos: whether texts begin with a BOS token.
        batch_size: None: found automatically.
        beyond: prompts that the model continues are read in full, even if they are longer than its context.

    ValueError: the harness is not installed, an unknown task, a model without a tokenizer; and, after all others,
    tasks that could not be evaluated, mostly because their data cannot be reached.
    """
    require()
    from canonlm.suites.harness.lm import CanonLM

    lm = CanonLM(subject, bos=bos, max_length=settings.max_length, batch_size=batch_size or "auto", beyond=beyond)
    scores_of: dict[str, list[Score]] = {}
    missing: dict[str, str] = {}

    def leave_out(name: str, reason: str) -> None:
        _log.warning("left out: %s", reason)
        missing[name] = reason

    def evaluate_part(part: Part) -> None:
        """A function of its own, so that a part's data is freed after it."""
        units: dict[str, Task | Group | None] = dict.fromkeys(part.names)
        if not units or not all(name in done for name in units):
            try:
                with _quietly():
                    units = {name_of(unit): unit for unit in load(manager, part)}
            except ValueError as error:
                leave_out(", ".join(part.names) or part.source, str(error))
                return
        for name, unit in units.items():
            if name in scores_of or name in missing:
                continue
            scores: list[Score] = []
            if unit is not None and name not in done:
                try:
                    scores = _evaluate(lm, manager, unit, settings)
                except ValueError as error:
                    leave_out(name, f"{name}: {error}")
                    continue
            scores_of[name] = scores
            on_task(name, scores)

    with TemporaryDirectory() as folder:
        # Tasks that make their own data measure it by this.
        lm.tokenizer.save_pretrained(folder)
        with _quietly():
            manager = open_tasks(settings.include, {"tokenizer": folder, **settings.metadata})
            planned = [part for source in find(manager, settings.tasks) for part in parts(manager, source)]
        for part in planned:
            evaluate_part(part)
    if missing:
        first, *others = missing
        raise ValueError(missing[first] + (f"; also not evaluated: {', '.join(others)}" if others else ""))
    return {name: scores for name, scores in scores_of.items() if name not in done}


def _evaluate(lm: "CanonLM", manager: "TaskManager", unit: "Task | Group", settings: HarnessSettings) -> list[Score]:
    from lm_eval.evaluator import evaluate

    name, lm.cut, lm.questions, lm.not_finite = name_of(unit), 0, 0, 0
    with _quietly():
        numbers = evaluate(
            lm=lm,
            task_dict=_ready(manager.load([unit]), settings.num_fewshot),
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=_is_rolling(unit),
        )
    scores = sorted(_scores(numbers, name), key=lambda score: len(score.slice))
    if lm.cut:
        _log.warning("%s: %d texts of more than %d tokens lost their beginning", name, lm.cut, lm.max_length)
        scores.append(Score("cut", lm.cut, stderr=None, n=None, higher_is_better=False, share=False))
    return [*scores, *not_finite(lm.not_finite, lm.questions)]


@contextmanager
def _quietly() -> Iterator[None]:
    """The harness's prints go to standard error, with its bars; its warnings, one per cut text, are dropped."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)


def _ready(loaded: Any, num_fewshot: int | None) -> Any:
    """Set the few-shot examples as the harness's `simple_evaluate` does. Calling that for each task would spend seconds
    on a description of this machine every time."""
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):  # a task with 0 cannot have any
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEEDS[1])
        task.process_results = _nan_is_wrong(task.process_results)
    seed()
    return loaded


def _nan_is_wrong(grade: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Any, Any], dict[str, Any]]:
    """The harness takes the first choice with a NaN score for the model's."""

    def graded(doc: Any, results: Any) -> dict[str, Any]:
        measured = grade(doc, results)
        if any(isinstance(result, tuple) and math.isnan(result[0]) for result in results):
            for name, value in measured.items():
                measured[name] = 0.0 if name in SHARES and not isinstance(value, tuple) else value
        return measured

    return graded


def _is_rolling(unit: "Task | Group") -> bool:
    from lm_eval.api.group import Group

    tasks = unit.get_all_tasks() if isinstance(unit, Group) else [unit]
    return any(task.OUTPUT_TYPE == "loglikelihood_rolling" for task in tasks)


def _scores(results: Any, unit: str) -> Iterator[Score]:
    """Scores from the harness's numbers by task, such as `{"acc,none": 0.5, "acc_stderr,none": 0.1, …}`."""
    for name, numbers in results["results"].items():
        keys = [key for key in numbers if "," in key and "_stderr," not in key]
        for key in keys:
            measure, _, filter = key.partition(",")
            value, stderr = float(numbers[key]), numbers.get(f"{measure}_stderr,{filter}")
            if measure.isdigit() and value < 0:  # a length of a needle that was not tested
                continue
            if not isinstance(stderr, int | float):  # it may be "N/A"
                stderr = _of_texts(measure, [row[measure] for row in results.get("samples", {}).get(name, [])])
            higher = results["higher_is_better"].get(name, {}).get(measure) is not False
            yield Score(
                measure=measure if sum(other.startswith(f"{measure},") for other in keys) == 1 else key,
                value=value,
                stderr=None if stderr is None else float(stderr),
                n=numbers.get("sample_len"),
                slice={} if name == unit else {"task": name},
                higher_is_better=higher,
                share=(measure in SHARES or measure.isdigit()) and not name.startswith(_IN_PERCENT),
            )


def _of_texts(measure: str, texts: Sequence[Any]) -> float | None:
    """The standard error of a perplexity (or of bits per byte) over `(log-likelihood, words or bytes)` of independent
    texts, which the harness lacks: that of a ratio of means, to first order."""
    if len(texts) < 2 or measure not in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        return None
    n, units = len(texts), sum(unit for _, unit in texts)
    nats = -sum(likelihood for likelihood, _ in texts) / units
    spread = sum((likelihood + nats * unit) ** 2 for likelihood, unit in texts)
    stderr = math.sqrt(n / (n - 1) * spread) / units
    return stderr / math.log(2) if measure == "bits_per_byte" else stderr * math.exp(nats)

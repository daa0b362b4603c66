"""Whether a run was trained like the paper's models of the same synthetic task: only then are numbers comparable.

The paper's training is that of the `paper` presets. Learning rates may differ, as the paper shows the best of several;
so may the precision.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from canonlm.experiments.published.benchmarks import DIFFICULTIES
from canonlm.experiments.published.names import setting_of
from canonlm.runs.identity import NOT_IN_GROUP, NOT_IN_IDENTITY, settings

_NEEDED = ("data.seq_len", "train.batch_size", "train.steps", "model.hidden_size", "model.num_attention_heads")


def as_in_the_paper(run: Mapping[str, Any]) -> bool:
    """Whether length, data, optimizer and size of heads are the paper's. run: settings with dotted keys. Layers and
    width are compared elsewhere."""
    task = {key.removeprefix("task."): value for key, value in run.items() if key.startswith("task.")}
    setting = setting_of(task)
    paper = _paper(task["name"], setting) if setting in DIFFICULTIES.get(task.get("name", ""), {}) else {}
    if not paper or not all(isinstance(run.get(key), int) for key in _NEEDED):
        return False
    if any(key.startswith("model.matched.") for key in run):
        return False
    width, heads = "model.hidden_size", "model.num_attention_heads"
    if run[width] * paper[heads] != paper[width] * run[heads]:
        return False
    return all(run.get(key, value) == value for key, value in paper.items() if key.startswith(("data.", "train.")))


@cache
def _paper(task: str, difficulty: str) -> dict[str, Any]:
    from canonlm.launch.recipes import load_preset
    from canonlm.train.config import resolve

    run = resolve({**load_preset(task, "paper", difficulty).run, "arch": "llama"})
    return settings(
        run.model_dump(mode="json"), (*NOT_IN_IDENTITY, *NOT_IN_GROUP, "train.precision", "train.on_nonfinite")
    )

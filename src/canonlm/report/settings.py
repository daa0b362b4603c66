"""Equal and differing settings of the runs of a comparison, read from the resolved configurations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from canonlm.report.format import shown
from canonlm.runs.groups import Group
from canonlm.runs.identity import flat

WORDS = {
    "train.optim.lr": "learning rate",
    "train.seed": "seed",
    "train.steps": "training steps",
    "train.batch_size": "batch size (windows)",
    "data.seq_len": "window length (tokens)",
    "data.loss_on": "loss on",
    "data.isolate_documents": "documents in a window isolated",
    "arch": "architecture",
}
PLANNED = ("arch", "train.optim.lr", "train.seed")  # what a grid varies on purpose
FIRST = ("preset", "data.", "train.steps", "train.batch_size", "task.")  # shown first
BOOKKEEPING = ("name", "out", "folder", "run")  # where a run was written does not matter
COMPARED = ("preset", "data.", "train.", "model.num_hidden_layers", "model.hidden_size", "model.num_attention_heads")
WITHOUT_EFFECT = (
    "train.checkpoint_every", "train.log_every", "train.keep_checkpoints", "train.keep_every", "train.num_threads",
)  # fmt: skip
ENV = ("machine", "cores", "python", "torch", "canonlm")


@dataclass(frozen=True)
class Setting:
    """`values`: one text per group, or one for all if they agree."""

    key: str
    label: str
    values: tuple[str, ...]

    @property
    def main(self) -> bool:
        return self.key.startswith(FIRST)


def settings(groups: Sequence[Group]) -> tuple[list[str], list[Setting], list[Setting]]:
    """(names of groups, equal, differing). The machine and the versions count as settings too."""
    archs = [group.name for group in groups]
    configs = [
        (group.name, flat(run.config) | {key: run.env[key] for key in ENV if key in run.env})
        for group in groups
        for run in group.runs
    ]
    keys = list(dict.fromkeys(key for _, values in configs for key in values if key not in BOOKKEEPING))
    equal, differing = [], []
    for key in keys:
        per_arch = tuple(_values([values.get(key) for arch, values in configs if arch == name]) for name in archs)
        distinct = {shown(values.get(key)) for _, values in configs}
        label = WORDS.get(key, key)
        if len(distinct) == 1:
            equal.append(Setting(key, label, (per_arch[0],)))
        else:
            differing.append(Setting(key, label, per_arch))
    return archs, sorted(equal, key=lambda setting: not setting.main), differing


def unplanned(groups: Sequence[Group]) -> list[str]:
    """Labels of settings of data, training and size that differ by accident."""
    _, _, differing = settings(groups)
    expected = (*PLANNED, *WITHOUT_EFFECT)
    return [one.label for one in differing if one.key.startswith(COMPARED) and one.key not in expected]


def _values(values: Sequence[Any]) -> str:
    distinct = sorted({shown(value): value for value in values}.items(), key=lambda item: (str(type(item[1])), item[1])
                      if isinstance(item[1], (int, float)) else (str(type(item[1])), item[0]))  # fmt: skip
    return ", ".join(text for text, _ in distinct) if len(distinct) <= 6 else f"{len(distinct)} values"

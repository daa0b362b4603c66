"""Sends the rows of `metrics.jsonl` to TensorBoard and Weights & Biases (extra `track`).

Only the first process sends rows. A continued run resumes at the checkpoint's step in both.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from canonlm.core.errors import InvalidSetting, expected
from canonlm.core.files import make_folder, refuse_links, write_text
from canonlm.core.untrusted import read_text
from canonlm.runs.rows import slice_key


class Tracker(Protocol):
    def write(self, row: dict[str, Any]) -> None:
        """A row of `metrics.jsonl`."""
        ...

    def close(self) -> None: ...


def check(names: Sequence[str]) -> None:
    """InvalidSetting for a tracker that is not installed. The names are those of the packages."""
    for name in names:
        if find_spec(name) is None:
            raise expected("track", "trackers that are installed (pip install 'canonlm[track]')", name)


def start(names: Sequence[str], folder: Path, config: dict[str, Any], step: int) -> list[Tracker]:
    """The trackers of the run in `folder`, which has done `step` steps. `config` is the resolved one."""
    trackers: list[Tracker] = []
    if "tensorboard" in names:
        trackers.append(TensorBoard(folder, step))
    if "wandb" in names:
        trackers.append(WandB(folder, config))
    return trackers


class TensorBoard:
    """Event files in `folder/tensorboard`. Values that an earlier process wrote for later steps are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = make_folder(folder, "tensorboard")
        refuse_links(events)
        self._writer = SummaryWriter(str(events), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project in WANDB_PROJECT (default: canonlm), offline with WANDB_MODE=offline; W&B's other variables
    work too. `folder/wandb/id` has the id with which W&B continues a run. W&B ignores numbers for earlier steps: for
    steps that are repeated after a kill it keeps the first values.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        name = make_folder(folder, "wandb") / "id"
        if not name.exists():
            write_text(name, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "canonlm"),
                id=read_text(name),
                name=folder.resolve().name,
                dir=folder,
                config=config,
                resume="allow",
                settings=wandb.Settings(silent=True, console="off"),  # the terminal is ours
            )
        except wandb.Error as error:
            raise InvalidSetting("track", f"track: wandb cannot start: {error}") from None

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row by name: `train/loss`; `eval/k=1`, the share of right answers of a slice; nested ones as
    `eval/measures/kl`."""
    return dict(_numbers(row["kind"], {key: value for key, value in row.items() if key not in ("kind", "step")}))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, value
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "slices":
                yield from _numbers(f"{name}/{key}", inner)
        for part in value.get("slices", ()):
            yield f"{name}/{slice_key(part['slice'])}", part["correct"] / max(1, part["total"])

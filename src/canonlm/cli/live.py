"""Follow one run: a live panel on a terminal, plain lines in a log."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from canonlm.cli.progress import duration, scores
from canonlm.train.config import RunConfig

MOST_MESSAGES = 4
BARS = "▁▂▃▄▅▆▇█"

OnRow = Callable[[dict[str, Any]], None]


@contextmanager
def follow(config: RunConfig, folder: Path) -> Generator[OnRow]:
    """What `train` is to call with every row. Under torchrun all processes share a terminal: the first one speaks."""
    console = Console()
    if os.environ.get("RANK", "0") != "0":
        yield lambda row: None
    elif not console.is_terminal:
        yield lambda row: print(line(config, row), flush=True)
    else:
        view = View(config, folder)
        with Live(view, console=console, refresh_per_second=4):
            yield view.take


def line(config: RunConfig, row: dict[str, Any]) -> str:
    """A row for people: `step 100  loss 2.1234  lr 3.00e-04  12,345 tokens/s`."""
    if row["kind"] == "train":
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
        return f"step {row['step']}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  {speed}".rstrip()
    return f"step {row['step']}  {_evaluation(config, row) if row['kind'] == 'eval' else _message(row)}"


class View:
    """All that is known of a run, as a panel that fits any width. It is drawn in a thread of its own."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.step = 0
        self.row: dict[str, Any] | None = None
        self.evaluation: dict[str, Any] | None = None
        self.losses: deque[float] = deque(maxlen=400)  # more than a terminal has columns
        self.messages: deque[dict[str, Any]] = deque(maxlen=MOST_MESSAGES)

    def take(self, row: dict[str, Any]) -> None:
        self.step = max(self.step, row["step"])
        if row["kind"] == "train":
            self.row = row
            self.losses.append(row["loss"])
        elif row["kind"] == "eval":
            self.evaluation = row
        else:
            self.messages.append(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._progress()]
        if self.row is not None:
            parts += ["", Columns(_numbers(self.row), equal=True)]
        width = options.max_width - len("loss ") - 4  # the panel's sides
        if len(self.losses) > 1 and width > 0 and not options.ascii_only:
            parts.append(Text.assemble(("loss ", "dim"), sparkline(list(self.losses)[-width:])))
        if self.evaluation is not None:
            step = f"step {self.evaluation['step']:,}  "
            parts += ["", Text.assemble((step, "dim"), _evaluation(self.config, self.evaluation))]
        if self.messages:
            told = [Text.assemble((f"step {row['step']:,}  ", "dim"), _message(row)) for row in list(self.messages)]
            parts += ["", *told]
        yield Panel(Group(*parts), title=Text(f"{self.folder.name}: {self.config.arch}"), title_align="left")

    def _progress(self) -> Table:
        steps = self.config.train.steps
        table = Table.grid("", "", "", padding=(0, 2, 0, 0), expand=True)
        table.columns[1].ratio = 1
        table.columns[0].no_wrap = table.columns[2].no_wrap = True
        left = f"{duration(seconds)} left" if (seconds := self._seconds_left()) is not None else ""
        table.add_row(f"step {self.step:,}/{steps:,}", ProgressBar(total=steps, completed=self.step), left)
        return table

    def _seconds_left(self) -> float | None:
        """At the speed of the last row; evaluations and checkpoints are not counted."""
        if self.row is None or not self.row["tokens_per_s"]:
            return None
        tokens_per_step = self.config.train.batch_size * self.config.data.seq_len
        return (self.config.train.steps - self.step) * tokens_per_step / self.row["tokens_per_s"]


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from the lowest ▁ to the highest █."""
    low, high = min(values), max(values)
    return "".join(BARS[round((len(BARS) - 1) * (value - low) / ((high - low) or 1))] for value in values)


def _numbers(row: dict[str, Any]) -> list[Text]:
    """The row's numbers, at least so wide that columns stay where they are from row to row."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("z_loss", "z-loss", "{:.2e}"),
        ("lr", "lr", "{:.2e}"),
        ("grad_norm", "gradient", "{:.3g}"),
        ("tokens", "tokens", "{:,}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
        ("mfu", "MFU", "{:.1%}"),
        ("data_wait_share", "data wait", "{:.1%}"),
        ("memory_gb", "memory", "{:.1f} GB"),
    ]
    known = [(name, form.format(row[key])) for key, name, form in shown if row.get(key) is not None]
    return [Text.assemble((name, "dim"), " ", value.ljust(15 - len(name))) for name, value in known]


def _evaluation(config: RunConfig, row: dict[str, Any]) -> str:
    if config.task is not None:
        return f"test loss {row['loss']:.4f}  {scores(config.task['name'], row)}"
    bits = ", ".join(f"{name} {found['bits_per_byte']:.4f}" for name, found in row["sets"].items())
    return f"validation loss {row['loss']:.4f}  bits per byte: {bits}"


def _message(row: dict[str, Any]) -> str:
    if row["kind"] == "checkpoint":
        return "checkpoint"
    return row["why"] if row["kind"] == "note" else f"skipped: {row['why']}"

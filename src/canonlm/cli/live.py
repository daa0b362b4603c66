"""Follow one run: a live panel on a terminal, plain lines in a log."""

import math
import time
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

from canonlm.cli.progress import LOG_SECONDS, duration
from canonlm.cli.status import say
from canonlm.core.ranks import prints
from canonlm.report.format import in_words
from canonlm.runs.follow import Latest
from canonlm.runs.rows import DAMAGE, Evaluation, Remark, TextEvaluation, TrainRow, evaluation, parse, text_evaluation
from canonlm.runs.task_info import named
from canonlm.train.config import RunConfig

MAX_MESSAGES = 4
BARS = "▁▂▃▄▅▆▇█"

Row = TrainRow | Evaluation | TextEvaluation | Remark
OnRow = Callable[[dict[str, Any]], None]


@contextmanager
def follow(config: RunConfig, folder: Path) -> Generator[OnRow]:
    """The function that `train` calls with every row. Under torchrun all processes share a terminal: only the first one
    prints."""
    console = Console()
    if not prints():
        yield lambda row: None
    elif not console.is_terminal:
        yield Lines(config, folder).show
    else:
        view = View(config, folder)
        with Live(view, console=console, refresh_per_second=4):
            yield view.show


def _parsed(config: RunConfig, row: dict[str, Any]) -> Row:
    """Parse a row of the training loop. A row that cannot be read does not stop the training."""
    try:
        return parse(row, evaluation) if config.text is None else parse(row, text_evaluation)
    except DAMAGE:
        return Remark(row["kind"], row["step"], "numbers that cannot be read")


class Lines(Latest):
    """Rows as lines of a log: one step every `LOG_SECONDS`, and every row that is not a step."""

    def __init__(self, config: RunConfig, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.folder, self.clock = config, folder, clock
        self.printed = -math.inf

    def show(self, row: dict[str, Any]) -> None:
        self.take(parsed := _parsed(self.config, row))
        now = self.clock()
        if math.isinf(self.printed):  # only with the first row: an error that refuses the run comes earlier
            say(f"{self.folder}: {self.config.arch}, {self.config.train.steps:,} steps", flush=True)
        if not isinstance(parsed, TrainRow) or now - self.printed >= LOG_SECONDS:
            self.printed = now
            say(self.line(parsed), flush=True)

    def line(self, row: Row) -> str:
        """`step 100/4000  loss 2.1234  lr 3.00e-04  12,345 tokens/s  4:05 left`"""
        if not isinstance(row, TrainRow):
            message = _message(row) if isinstance(row, Remark) else _evaluation(self.config, row)
            return f"step {row.step}  {message}"
        parts = [f"step {row.step}/{self.config.train.steps}  loss {row.loss:.4f}  lr {row.lr:.2e}"]
        parts += [f"{row.tokens_per_s:,.0f} tokens/s"] if row.tokens_per_s else []
        seconds = time_left(self.config, self)
        return "  ".join([*parts, *([] if seconds is None else [f"{duration(seconds)} left"])])


def time_left(config: RunConfig, latest: Latest) -> float | None:
    """Seconds until the last step; None if the speed is not known."""
    return latest.seconds_left(config.train.steps, config.train.batch_size * config.data.seq_len)


class View(Latest):
    """The state of a run, as a panel that fits any width. It is drawn in its own thread."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.losses: deque[float] = deque(maxlen=400)  # more than a terminal has columns
        self.messages: deque[Remark] = deque(maxlen=MAX_MESSAGES)

    def show(self, row: dict[str, Any]) -> None:
        self.take(parsed := _parsed(self.config, row))
        if isinstance(parsed, TrainRow):
            self.losses.append(parsed.loss)
        elif isinstance(parsed, Remark):
            self.messages.append(parsed)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._progress()]
        if self.train is not None:
            parts += ["", Columns(_numbers(self.train), equal=True)]
        width = options.max_width - len("loss ") - 4  # the panel's borders and padding
        if len(self.losses) > 1 and width > 0 and not options.ascii_only:
            parts.append(Text.assemble(("loss ", "dim"), sparkline(list(self.losses)[-width:])))
        if self.evaluation is not None:
            step = f"step {self.evaluation.step:,}  "
            parts += ["", Text.assemble((step, "dim"), _evaluation(self.config, self.evaluation))]
        if self.messages:
            messages = [Text.assemble((f"step {row.step:,}  ", "dim"), _message(row)) for row in list(self.messages)]
            parts += ["", *messages]
        yield Panel(Group(*parts), title=Text(f"{self.folder.name}: {self.config.arch}"), title_align="left")

    def _progress(self) -> Table:
        steps = self.config.train.steps
        table = Table.grid("", "", "", padding=(0, 2, 0, 0), expand=True)
        table.columns[1].ratio = 1
        table.columns[0].no_wrap = table.columns[2].no_wrap = True
        seconds = time_left(self.config, self)
        left = f"{duration(seconds)} left" if seconds is not None else ""
        table.add_row(f"step {self.step:,}/{steps:,}", ProgressBar(total=steps, completed=self.step), left)
        return table


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from the lowest ▁ to the highest █."""
    low, high = min(values), max(values)
    return "".join(BARS[round((len(BARS) - 1) * (value - low) / ((high - low) or 1))] for value in values)


def _numbers(row: TrainRow) -> list[Text]:
    """The row's numbers, padded so that columns stay in place from row to row."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("z_loss", "z-loss", "{:.2e}"),
        ("lr", "lr", "{:.2e}"),
        ("grad_norm", "gradient", "{:.3g}"),
        ("tokens", "tokens", "{:,.0f}"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
        ("mfu", "MFU", "{:.1%}"),
        ("data_wait_share", "data wait", "{:.1%}"),
        ("memory_gb", "memory", "{:.1f} GB"),
    ]
    known = [(name, form.format(value)) for key, name, form in shown if (value := getattr(row, key)) is not None]
    return [Text.assemble((name, "dim"), " ", value.ljust(15 - len(name))) for name, value in known]


def _evaluation(config: RunConfig, row: Evaluation | TextEvaluation) -> str:
    loss = math.nan if row.loss is None else row.loss
    if isinstance(row, Evaluation):
        return f"test loss {loss:.4f}  {in_words(named(config.built_task), row)}"
    each = {name: math.nan if part.bits_per_byte is None else part.bits_per_byte for name, part in row.sets.items()}
    bits = ", ".join(f"{name} {value:.4f}" for name, value in each.items())
    return f"validation loss {loss:.4f}  bits per byte: {bits}"


def _message(row: Remark) -> str:
    if row.kind == "checkpoint":
        return "checkpoint"
    return row.why if row.kind == "note" else f"skipped: {row.why}"

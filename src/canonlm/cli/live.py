"""What runs are doing: a live view on a terminal, lines in a log, and the page of a play folder. One run that this
process trains (`follow_run`), a grid that it starts (`follow_grid`), or runs of other processes (`follow_folders`)."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from canonlm.cli import later
from canonlm.cli.status import say
from canonlm.core.errors import plain
from canonlm.core.ranks import prints
from canonlm.report import load_play
from canonlm.report.format import in_words
from canonlm.runs.folder import run_folders
from canonlm.runs.identity import slug
from canonlm.runs.rows import DAMAGE, Evaluation, Remark, TrainRow, of_set, parse
from canonlm.runs.task_info import TaskInfo
from canonlm.runs.watch import Latest, Watch, Watched

LOG_SECONDS = 10.0  # between two lines of one run in a log
POLL_SECONDS = 2.0  # between two looks at the folders of other processes
PAGE_SECONDS = 30.0  # between two writes of the page, unless a run ends
MAX_PAGE_SHARE = 1 / 20  # of the time, for writing the page
ORDER = ("running", "unfinished", "failed", "waiting", "damaged", "finished")  # where runs in progress can be seen
ROWS_AROUND = 4  # of the terminal: the head of the table, its last line, and the prompt
WIDE = 120  # columns; from this width on, the table of a grid has speeds and a longer bar
OTHERS = 50  # columns that the rest of a row takes, with the first of its scores
MAX_MESSAGES = 4
BARS = "▁▂▃▄▅▆▇█"

Row = TrainRow | Evaluation | Remark
OnRow = Callable[[dict[str, Any]], None]
Grid = Sequence["later.play.Progress"]


@contextmanager
def follow_run(config: "later.config.RunConfig", folder: Path) -> Generator[OnRow]:
    """The function that `train` calls with every row. Under torchrun all processes share a terminal: only the first one
    prints."""
    console = Console()
    if not prints():
        yield lambda row: None
    elif not _is_live(console):
        yield RunLines(config, folder).show
    else:
        panel = RunPanel(config, folder)
        with Live(panel, console=console, refresh_per_second=4):
            yield panel.show


def follow_grid(runs: "Sequence[later.grid.PlannedRun]", jobs: int | None, show_page: Callable[[Grid], None]) -> Grid:
    """Run the grid and show its progress, on the terminal and on the page."""
    console = Console()
    jobs = min(jobs or later.play.default_jobs(runs), len(runs))
    with _screen(console, refresh_per_second=4) as live:
        if live is None:
            say(f"{_count(runs)} in {runs[0].folder.parent}, {jobs} at a time")
        lines = GridLines(console, jobs)

        def show(grid: Grid) -> None:
            lines(grid) if live is None else live.update(grid_table(grid, jobs, console))
            show_page(grid)

        return later.play.run_grid(runs, jobs, show)


def follow_folders(folders: Sequence[Path], console: Console) -> bool:
    """Show the runs until none is in progress; False after Ctrl-C. ValueError: a folder without runs."""
    for folder in folders:
        run_folders(folder)
    watch = Watch(folders)
    try:
        with _screen(console, auto_refresh=False) as live:
            while True:
                changed = watch.read(time.time())
                if live is not None:
                    live.update(watched_table(watch.runs, console.height), refresh=True)
                for run in changed if live is None else ():
                    print(watched_line(run), flush=True)
                if watch.done:
                    return True
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return False


def _screen(console: Console, **options: Any) -> AbstractContextManager[Live | None]:
    return Live(console=console, **options) if _is_live(console) else nullcontext()


def _is_live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def _parsed(row: dict[str, Any]) -> Row:
    """Parse a row of the training loop. A row that cannot be read does not stop the training."""
    try:
        return parse(row)
    except DAMAGE:
        return Remark(row["kind"], row["step"], "numbers that cannot be read")


class RunLines(Latest):
    """Rows as lines of a log: one step every `LOG_SECONDS`, and every row that is not a step."""

    def __init__(
        self, config: "later.config.RunConfig", folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.folder, self.clock = config, folder, clock
        self.printed = -math.inf

    def show(self, row: dict[str, Any]) -> None:
        self.take(parsed := _parsed(row))
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
        return "  ".join([*parts, *_left(_time_left(self.config, self))])


class RunPanel(Latest):
    """The state of a run, as a panel that fits any width. It is drawn in its own thread."""

    def __init__(self, config: "later.config.RunConfig", folder: Path) -> None:
        self.config, self.folder = config, folder
        self.losses: deque[float] = deque(maxlen=400)  # more than a terminal has columns
        self.messages: deque[Remark] = deque(maxlen=MAX_MESSAGES)

    def show(self, row: dict[str, Any]) -> None:
        self.take(parsed := _parsed(row))
        if isinstance(parsed, TrainRow):
            self.losses.append(parsed.loss)
        elif isinstance(parsed, Remark):
            self.messages.append(parsed)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self._progress()]
        if self.train is not None:
            parts += ["", Columns(_row_numbers(self.train), equal=True)]
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
        left = "".join(_left(_time_left(self.config, self)))
        table.add_row(f"step {self.step:,}/{steps:,}", ProgressBar(total=steps, completed=self.step), left)
        return table


def sparkline(values: Sequence[float]) -> str:
    """One character per value, from the lowest ▁ to the highest █."""
    low, high = min(values), max(values)
    return "".join(BARS[round((len(BARS) - 1) * (value - low) / ((high - low) or 1))] for value in values)


def _row_numbers(row: TrainRow) -> list[Text]:
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


def _evaluation(config: "later.config.RunConfig", row: Evaluation) -> str:
    loss = math.nan if row.loss is None else row.loss
    if row.slices:
        return f"test loss {loss:.4f}  {in_words(TaskInfo.of(config.built_task), row)}"
    each = {name: row.measures.get(of_set("bits per byte", name), math.nan) for name in row.sets}
    bits = ", ".join(f"{name} {value:.4f}" for name, value in each.items())
    return f"validation loss {loss:.4f}  bits per byte: {bits}"


def _message(row: Remark) -> str:
    if row.kind == "checkpoint":
        return "checkpoint"
    return row.why if row.kind == "note" else f"skipped: {row.why}"


def _time_left(config: "later.config.RunConfig", latest: Latest) -> float | None:
    """Seconds until the last step; None if the speed is not known."""
    return latest.seconds_left(config.train.steps, config.train.batch_size * config.data.seq_len)


class GridLines:
    """A line when a run changes its state or evaluates, and one every `LOG_SECONDS` while it trains."""

    def __init__(self, console: Console, jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.jobs, self.clock = console, jobs, clock
        self.seen: dict[str, tuple[str, int]] = {}
        self.steps: dict[str, int] = {}
        self.times: dict[str, float] = {}

    def __call__(self, grid: Grid) -> None:
        now = self.clock()
        for progress in grid:
            key = progress.run.name
            state = progress.state, progress.evaluation.step if progress.evaluation else -1
            changed = state != self.seen.get(key, ("waiting", -1))
            moved = progress.state == "running" and progress.step != self.steps.get(key, 0)
            if changed or (moved and now - self.times[key] >= LOG_SECONDS):
                settled = progress.state in ("finished", "failed") and changed
                total = f"({_total(grid, self.jobs)})" if settled else ""
                parts = (grid_line(progress), _scores(progress) if changed else "", total)
                self.console.print(_joined(parts), highlight=False, soft_wrap=True, markup=False)
                self.seen[key], self.steps[key], self.times[key] = state, progress.step, now


def grid_line(progress: "later.play.Progress") -> str:
    """`depo-llama-lr0.001-seed0: running, step 300/600  loss 1.234  12,345 tokens/s  0:40 left`"""
    parts = [f"{progress.run.name}: {progress.state}, step {progress.step}/{progress.run.config.train.steps}"]
    if progress.train is not None and progress.state == "running":
        parts += [*_numbers(progress), *_left(progress.time_left)]
    return "  ".join(parts)


def watched_line(run: Watched) -> str:
    """`depo-llama-lr0.001-seed0: running, step 300/600  loss 1.234  12,345 tokens/s  1 hop 0.93  2 hops 0.41`"""
    early = f"at step {run.evaluation.step}: " if run.evaluation and run.evaluation.step < run.step else ""
    state = f"{run.name}: {run.state_text}, step {_step(run)}"
    return _joined([state, *_numbers(run), f"{early}{in_words(run.task, run.evaluation)}"])


def _joined(parts: Iterable[str]) -> str:
    return plain("  ".join(part for part in parts if part))


def grid_table(grid: Grid, jobs: int, console: Console) -> Table:
    """A row per run, as many as fit, and the total below."""
    wide = console.width >= WIDE
    names = [short_name(progress.run) for progress in grid]
    table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
    table.add_column("run", overflow="fold", width=min(max(map(len, names)), max(12, console.width - OTHERS)))
    widths = {"progress": 14 if wide else 8, "loss": 6, "left": 8, **({"tokens/s": 9} if wide else {})}
    for name, width in widths.items():
        table.add_column(name, width=width, no_wrap=True)
    table.add_column("on the test", no_wrap=True)
    rows, more = _fitting(grid, console.height)
    for progress in rows:
        bar = ProgressBar(total=progress.run.config.train.steps, completed=progress.step)
        seconds = progress.time_left if progress.state == "running" else None
        left = progress.state if seconds is None else duration(seconds)
        speed = [_speed(progress)] if wide else []
        table.add_row(Text(short_name(progress.run)), bar, _loss(progress), left, *speed, _scores(progress))
    table.caption = "; ".join(filter(None, (_total(grid, jobs), more)))
    return table


def watched_table(runs: Sequence[Watched], height: int) -> Table:
    """A row per run, as many as fit."""
    names = len({_label(run) for run in runs}) < len(runs)  # then nothing else tells them apart
    head = ["run"] * names + ["architecture", "task", "lr", "seed", "step", "tokens/s", "loss", "on the test", "state"]
    table = Table(*head, box=None, padding=(0, 2, 0, 0), title_justify="left", caption_justify="left")
    widths = {"step": 9, "loss": 6, "state": len("unfinished"), "on the test": 8, "architecture": 11}
    for column, name in zip(table.columns, head, strict=True):
        column.justify = "right" if name in ("lr", "seed", "step", "tokens/s", "loss") else "left"
        column.no_wrap, column.min_width = True, widths.get(name)
    rows, more = _fitting(runs, height)
    for run in rows:
        speed = _speed(run) if run.state == "running" else ""
        numbers = _step(run), speed, _loss(run), in_words(run.task, run.evaluation), run.state_text
        table.add_row(*(Text(plain(text)) for text in ([run.name] * names + [*_label(run), *numbers])))
    finished = f"{sum(run.state == 'finished' for run in runs)} of {len(runs)} finished"
    table.caption = f"{', '.join(filter(None, (finished, more)))}. Ctrl-C ends this view, not the runs."
    return table


def _fitting(runs: Sequence[Any], height: int) -> tuple[list[Any], str]:
    """The runs that fit a terminal of this height, those in progress first, and a text about the others."""
    rows, fitting = sorted(runs, key=lambda run: ORDER.index(run.state)), max(1, height - ROWS_AROUND)
    return rows[:fitting], f"{len(rows) - fitting} more not shown" if len(rows) > fitting else ""


def _label(run: Watched) -> tuple[str, ...]:
    lr, seed = ("?" if value is None else f"{value:g}" for value in (run.lr, run.seed))
    return run.arch, run.task.name, lr, seed


def _step(run: Watched) -> str:
    return f"{run.step}/{'?' if run.steps is None else run.steps}"


def _loss(run: Latest) -> str:
    return f"{run.train.loss:.3f}" if run.train else ""


def _speed(run: Latest) -> str:
    return f"{run.train.tokens_per_s:,.0f}" if run.train and run.train.tokens_per_s else ""


def _numbers(run: "Watched | later.play.Progress") -> list[str]:
    """`loss 1.234` and `12,345 tokens/s`, where known."""
    loss, speed = _loss(run), _speed(run) if run.state == "running" else ""
    return [f"loss {loss}"] * bool(loss) + [f"{speed} tokens/s"] * bool(speed)


def _left(seconds: float | None) -> list[str]:
    return [] if seconds is None else [f"{duration(seconds)} left"]


def _total(grid: Grid, jobs: int) -> str:
    """`3 of 12 runs, about 8 min left`"""
    settled = sum(progress.state in ("finished", "failed") for progress in grid)
    seconds = later.play.grid_time_left(grid, jobs) if settled < len(grid) else None
    left = "" if seconds is None else f", about {max(1, round(seconds / 60))} min left"
    return f"{settled} of {_count(grid)}{left}"


def _count(runs: Sequence[object]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def short_name(run: "later.grid.PlannedRun") -> str:
    """The run's name without its task, which all runs of a grid share: `llama-lr0.001-seed0`."""
    return run.name[max(0, run.name.find(slug(run.config.arch))) :]


def _scores(progress: "later.play.Progress") -> str:
    return in_words(TaskInfo.of(progress.run.task), progress.evaluation)


def duration(seconds: float) -> str:
    """`4:05`, `2:04:05` or `3 d 2 h`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class LivePage:
    """Writes the page of a play folder when called with the state of its grid: at the start, when a run has ended, and
    otherwise every `PAGE_SECONDS`, but for at most `MAX_PAGE_SHARE` of the time; when the last run has ended, always.
    The page reloads itself until it is written without `live`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.settled, self.soon, self.next = -1, 0.0, 0.0  # soon: from when on the end of a run counts

    def __call__(self, grid: Grid) -> None:
        settled = sum(progress.state in ("finished", "failed") for progress in grid)
        start = self.clock()
        if start >= self.next or (settled != self.settled and (start >= self.soon or settled == len(grid))):
            self.write(live=settled < len(grid))
            self.settled, end = settled, self.clock()
            self.soon = end + (end - start) / MAX_PAGE_SHARE
            self.next = max(self.soon, end + PAGE_SECONDS)

    def write(self, *, live: bool) -> None:
        """Write the page. Errors are ignored: runs do not depend on it, and the report at the end shows them."""
        try:
            later.page.write_page(load_play(self.folder), later.page.place_of(self.folder, None), live=live)
        except (OSError, ValueError):
            return

"""Follow runs of other processes: a live table on a terminal, a line for every change in a log."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from canonlm.core.errors import plain
from canonlm.report.format import in_words
from canonlm.runs.folder import run_folders
from canonlm.runs.watch import Watch, Watched

POLL_SECONDS = 2.0
ORDER = ("running", "unfinished", "waiting", "damaged", "finished")  # runs in progress stand where they can be seen
ROWS_AROUND = 4  # of the terminal: the head of the table, its last line, and the prompt

Show = Callable[[Sequence[Watched]], None]


def follow(folders: Sequence[Path], console: Console) -> bool:
    """Show the runs until none is in progress; False after Ctrl-C. ValueError: a folder without runs."""
    for folder in folders:
        run_folders(folder)
    watch = Watch(folders)
    try:
        if not console.is_terminal:
            _until_done(watch, _print_new)
        else:
            with Live(console=console, auto_refresh=False) as live:
                _until_done(watch, lambda new: live.update(table(watch.runs, console.height), refresh=True))
    except KeyboardInterrupt:
        return False
    return True


def _until_done(watch: Watch, show: Show) -> None:
    while True:
        show(watch.read(time.time()))
        if watch.done:
            return
        time.sleep(POLL_SECONDS)


def _print_new(new: Sequence[Watched]) -> None:
    for run in new:
        print(line(run), flush=True)


def line(run: Watched) -> str:
    """`depo-llama-lr0.001-seed0: running, step 300/600  loss 1.234  12,345 tokens/s  1 hop 0.93  2 hops 0.41`"""
    early = f"at step {run.evaluation.step}: " if run.evaluation and run.evaluation.step < run.step else ""
    state = f"{run.name}: {run.state_text}, step {_step(run)}"
    parts = [state, *_numbers(run), f"{early}{in_words(run.task, run.evaluation)}"]
    return plain("  ".join(part for part in parts if part))


def table(runs: Sequence[Watched], height: int) -> Table:
    """A row per run, as many as fit."""
    names = len({_label(run) for run in runs}) < len(runs)  # then nothing else tells them apart
    head = ["run"] * names + ["architecture", "task", "lr", "seed", "step", "tokens/s", "loss", "on the test", "state"]
    rows = Table(*head, box=None, padding=(0, 2, 0, 0), title_justify="left", caption_justify="left")
    for place, name in enumerate(head):
        rows.columns[place].justify = "right" if name in ("lr", "seed", "step", "tokens/s", "loss") else "left"
        rows.columns[place].no_wrap = True
    for name, width in (
        ("step", 9), ("loss", 6), ("state", len("unfinished")), ("on the test", 8), ("architecture", 11),
    ):  # fmt: skip
        rows.columns[head.index(name)].min_width = width
    runs = sorted(runs, key=lambda run: ORDER.index(run.state))
    max_rows = max(1, height - ROWS_AROUND)
    for run in runs[:max_rows]:
        loss, speed = _loss(run), _speed(run)
        evaluation = in_words(run.task, run.evaluation)
        texts = [run.name] * names + [*_label(run), _step(run), speed, loss, evaluation, run.state_text]
        rows.add_row(*(Text(plain(text)) for text in texts))
    finished = sum(run.state == "finished" for run in runs)
    more = f", {len(runs) - max_rows} more not shown" if len(runs) > max_rows else ""
    rows.caption = f"{finished} of {len(runs)} finished{more}. Ctrl-C ends this view, not the runs."
    return rows


def _label(run: Watched) -> tuple[str, ...]:
    lr, seed = ("?" if value is None else f"{value:g}" for value in (run.lr, run.seed))
    return run.arch, run.task, lr, seed


def _step(run: Watched) -> str:
    return f"{run.step}/{'?' if run.steps is None else run.steps}"


def _loss(run: Watched) -> str:
    return f"{run.train.loss:.3f}" if run.train else ""


def _speed(run: Watched) -> str:
    speed = run.train.tokens_per_s if run.train and run.state == "running" else None
    return f"{speed:,.0f}" if speed else ""


def _numbers(run: Watched) -> list[str]:
    return [f"{name}{value}{unit}" for name, value, unit in (("loss ", _loss(run), ""), ("", _speed(run), " tokens/s"))
            if value]  # fmt: skip

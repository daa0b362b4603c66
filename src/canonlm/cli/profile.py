"""`canonlm profile`: compare architectures on small tasks, with verdicts, on one page."""

import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli import completion, later
from canonlm.cli.options import Figures, Jobs, Match, SeedSet, parts_of, seed_set_of
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.core.errors import expected, writing
from canonlm.core.extras import needed
from canonlm.core.files import make_folder, write_text

ARCHS = typer.Argument(
    help="Architectures, separated by commas; the others are compared with the first. `canonlm archs` lists them; "
    "FILE.py:NAME: one of yours.",
    autocompletion=completion.architectures,
    metavar="ARCHS",
)
TASKS = typer.Option(
    "--only",
    "--tasks",
    help="Tasks and abilities, separated by commas: depth, copying, breadth, manipulation, structure and capacity (the "
    "default), tracking (s3, z60, a5), recall (noisy-recall, changed-recall) and length (longer-words, more-pairs, "
    "longer-rings).",
)
SEEDS = typer.Option(
    help="Seeds for each architecture. Default: as many as verdicts need, which is 6 for one comparison and 8 for six; "
    "with --quick 1."
)
QUICK = typer.Option(
    "--quick", help="One learning rate, one seed, a third of the training: takes minutes, proves nothing."
)
UNTIL = typer.Option(
    help="Train until this share of answers is right, such as 90%, or for four times the steps: how much faster is it?",
    metavar="SHARE",
)
SIZES = typer.Option(
    help="Sizes of all models, such as 2L64D,2L128D: layers and width. Each task then has a row for each size, and the "
    "page says how differences change. Default: one size, that of the task's preset.",
)
OUT = typer.Option(help="Folder for runs and page. In the folder of `canonlm replicate`, runs are shared.")
DRY_RUN = typer.Option("--dry-run", help="Only show what would be trained and how long that takes on this machine.")


def profile(
    archs: Annotated[list[str], ARCHS],
    tasks: Annotated[str | None, TASKS] = None,
    seeds: Annotated[int | None, SEEDS] = None,
    quick: Annotated[bool, QUICK] = False,
    match: Match = None,
    until: Annotated[str | None, UNTIL] = None,
    sizes: Annotated[str | None, SIZES] = None,
    seed_set: SeedSet = "0",
    out: Annotated[Path, OUT] = Path("runs/profile"),
    jobs: Jobs = 2,
    dry_run: Annotated[bool, DRY_RUN] = False,
    figures: Figures = None,
) -> int:
    """Is my architecture better, at what, and how sure is that? Trains small models on six tasks and writes one page.

    All architectures see the same data at the same learning rates. Three seeds choose the rate of each on a validation
    split; other seeds are judged on the test split. The page is OUT/profile.html. Ctrl-C saves every run; the same
    command continues where it stopped.
    """
    for text in archs:
        if re.match(r"[a-z]\w*(\.\w+)+=", text):
            raise ValueError(f'canonlm profile takes no settings, got "{text}"; `canonlm play` does')
    if figures is not None:
        later.figures.check()
    needed("plotly", "canonlm profile")
    keep_going()
    load_torch()
    requested, chosen = parts_of("--only", tasks), parts_of("--sizes", sizes)
    names = later.names.split_names(",".join(archs))
    number = seed_set_of(seed_set, out)
    experiment = later.profiles.profile(
        names, requested, seeds=seeds, quick=quick, match=match, until=_share(until), sizes=chosen, seed_set=number
    )
    following = _Following(experiment, out, jobs)
    with doing("timing a few steps of each model"):
        left = following.left()
    if dry_run:
        following.show_plan()
        return 0
    say(left, flush=True)
    try:
        scale = later.profiles.SCALE
        following.outcomes |= later.replicate.replicate([experiment], scale, out, jobs=jobs, on_event=following)
    except KeyboardInterrupt:
        following.write()
        raise

    shown = following.write()
    words = later.profile_text
    say("\n".join([*words.headlines(shown), *words.verdicts(shown), *words.growth(shown), *words.noise(shown)]))
    say(f"wrote {following.page}")
    if figures is not None:
        later.figures.write_figures(following.page.read_text("utf-8"), figures)
        say(f"wrote figures, SVG and PDF: {figures}")
    failed = sorted(run for run, outcome in following.outcomes.items() if outcome is None)
    for run in failed:
        say(f"failed: {run}; {out / 'leases' / f'{run}.failures.json'} says why")
    return 1 if failed else 0


def _share(text: str | None) -> float | None:
    """`90%` → 0.9."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None or not 0 < float(match[1]) <= 100:
        raise expected("--until", "a share of right answers, such as 90%", text)
    return float(match[1]) / 100


class _Following:
    """Follows the runs of a profile: prints each event, and writes the page when a reported run has finished."""

    def __init__(self, experiment: "later.schema.Experiment", out: Path, jobs: int) -> None:
        self.experiment, self.out, self.page = experiment, out, out / "profile.html"
        self.jobs, self.progress = jobs, dict[str, later.play.Progress]()
        self.outcomes = later.ledger.outcomes_of([experiment], later.profiles.SCALE, out)
        self.planned: set[str] = set()

    def __call__(self, event: "later.queue.Event") -> None:
        run, message = event.run, f": {event.message}" if event.message else ""
        self._progress_of(run.name, run.config).take_event(event)
        if event.kind in ("finished", "failed"):
            # Also the runs of other workers.
            self.outcomes = later.ledger.outcomes_of([self.experiment], later.profiles.SCALE, self.out, self.outcomes)
            self.outcomes.setdefault(run.name, None)
            message += f"  ({self.left()})"
            if run.config.train.eval_split == "test":
                self.write()
            else:
                self.say_what_seeds_show()
        say(f"{event.kind:<9} {run.name}{message}", flush=True)

    def say_what_seeds_show(self) -> None:
        """Once for each task, when its tuning runs are done: before anything is judged."""
        lines = later.profile_text.planned(later.profile_results.profiled(self.experiment, self.outcomes))
        for line in lines:
            if line not in self.planned:
                self.planned.add(line)
                say(line, flush=True)

    def left(self) -> str:
        """`17 of 72 runs, about 43 min left`"""
        runs = later.profiles.runs_of(self.experiment, self.outcomes)
        done = sum(run.name in self.outcomes for run in runs)
        if done == len(runs):
            return f"{done} of {len(runs)} runs"
        grid = [self._progress_of(*run) for run in runs]
        for progress in grid:
            progress.update()
        rest = [each for each in grid if each.state == "finished" or each.run.name not in self.outcomes]
        seconds = later.play.grid_time_left(rest, self.jobs, later.plan.timed_steps) or 0.0
        return f"{done} of {len(runs)} runs, about {max(1, round(seconds / 60))} min left"

    def _progress_of(self, name: str, config: "later.config.RunConfig") -> "later.play.Progress":
        run = later.grid.PlannedRun(name, self.out / "runs" / name, config)
        return self.progress.setdefault(name, later.play.Progress(run))

    def write(self) -> "later.profile_results.Profile":
        shown = later.profile_results.profiled(self.experiment, self.outcomes)
        with writing("--out", self.out):
            make_folder(self.out)
            write_text(self.page, later.profile_page.html(shown, shlex.join(["canonlm", *sys.argv[1:]])))
        return shown

    def show_plan(self) -> None:
        runs = later.profiles.runs_of(self.experiment, self.outcomes)
        named = [
            (
                (str((run.config.task or {})["name"]), run.config.arch, later.experiment_grid.size_of(run.config)),
                run.config,
            )
            for run in runs
        ]
        models, counts = dict(named), Counter(key for key, _ in named)
        table = Table("task", "architecture", "size", "runs", "steps", "minutes a run", box=None, padding=(0, 2, 0, 0))
        for key, config in models.items():
            seconds = later.plan.START_SECONDS + later.plan.tokens_of(config) * later.plan.timed_steps(config)
            table.add_row(*key, str(counts[key]), f"{config.train.steps:,}", f"{seconds / 60:.1f}")
        Console(soft_wrap=True).print(table)
        say(f"{self.left()}, {self.jobs} at a time, estimated from a few timed steps of each model")

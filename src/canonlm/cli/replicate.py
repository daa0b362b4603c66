"""`canonlm replicate`: train the models of a figure of the paper again, and judge its claims."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from canonlm.cli import completion, later
from canonlm.cli.claims import lines_of
from canonlm.cli.options import Figures, Jobs, SeedSet, SlurmSettings, SlurmWorkers, parts_of, seed_set_of
from canonlm.cli.status import doing, keep_going, load_torch, say
from canonlm.cli.work import submit
from canonlm.core.errors import brief, expected, writing
from canonlm.core.files import make_folder, write_text

NAME = typer.Argument(
    help="fig4, fig5, fig7, fig10, fig12, fig13, fig14, fig24 to fig29, capacity, hops, text; all; a YAML file of "
    "yours; or predict, which trains nothing: does a ranking here predict one elsewhere?",
    autocompletion=completion.experiments,
    metavar="EXPERIMENT",
)
SCALE = typer.Option(
    help="micro: two CPU cores. small: one GPU. paper: the paper's own sizes.", autocompletion=completion.scales
)
OUT = typer.Option(help="Folder for the runs, which experiments share.")
DRY_RUN = typer.Option(
    "--dry-run", help="Only show what would be trained and what that takes; with --slurm, the job's script."
)
ONLY = typer.Option(help="Settings or claims to train, separated by commas, such as depo-micro or C25.")
GPU = typer.Option(help="With --dry-run: the kind of GPU whose hours are shown.")
TRUST = typer.Option("--trust", help="Run the Python files that somebody else's experiment names.")
EXPORT = typer.Option(
    help="Add the finished runs to CSV files in this folder; runs already in them are not trained again."
)


def replicate(
    name: Annotated[str, NAME],
    job: SlurmSettings = None,
    scale: Annotated[str, SCALE] = "micro",
    out: Annotated[Path, OUT] = Path("runs/replicate"),
    jobs: Jobs = 2,
    dry_run: Annotated[bool, DRY_RUN] = False,
    only: Annotated[str | None, ONLY] = None,
    seed_set: SeedSet = "0",
    gpu: Annotated[str, GPU] = "h100",
    export: Annotated[Path | None, EXPORT] = None,
    slurm: SlurmWorkers = False,
    trust: Annotated[bool, TRUST] = False,
    figures: Figures = None,
) -> int:
    """Train the models of one of the paper's figures again, and judge the claims about it.

    Learning rates are chosen by tuning seeds on a validation split; verdicts come from fresh seeds. Ctrl-C saves every
    run; the same command continues where it stopped. Several machines may run it in one folder at the same time.
    """
    if job and not slurm:
        raise ValueError(f"{brief(job[0])}: settings of a job only work with --slurm")
    if figures is not None:
        later.figures.check()
    load_torch()
    if name == "predict":
        if job or slurm or dry_run or only is not None or export or trust or (scale, seed_set) != ("micro", "0"):
            raise ValueError("canonlm replicate predict trains nothing, and takes --out and --figures alone")
        if out.suffix in (".html", ".md"):
            raise expected("--out", "a folder, for the page prediction.html", str(out))
        return _predict(out, figures)
    if figures is not None:
        raise ValueError("--figures only works with predict; canonlm claims --figures DIR draws the verdicts")
    settings = parts_of("--only", only)
    number = seed_set_of(seed_set, out, *([export] if export is not None else []))
    experiments = later.replicate.chosen(name, scale, settings, seed_set=number, trust=trust)
    if slurm:
        place = name if name == "all" or name in later.schema.names() else str(Path(name).absolute())
        arguments = ["replicate", place, "--scale", scale, "--out", str(out.absolute()), "--jobs", str(jobs)]
        arguments += ["--trust"] if trust else []
        arguments += ["--seed-set", str(number)] if number else []
        arguments += ["--export", str(export.absolute())] if export is not None else []
        return submit(out, [*arguments, *(["--only", only] if only else [])], job or [], dry_run)
    exported = later.ledger.read(export) if export is not None else {}
    if dry_run:
        with doing("counting runs and FLOPs"):
            estimates = later.replicate.estimate(experiments, scale, out, gpu, settings, exported)
        _print_estimates(estimates, scale, gpu)
        return 0
    keep_going()
    try:
        outcomes = later.replicate.replicate(
            experiments,
            scale,
            out,
            jobs=jobs,
            only=settings,
            finished=exported,
            on_event=functools.partial(print, flush=True),
        )
    finally:
        if export is not None:
            later.ledger.export(experiments, scale, out, export)
    by_name = {experiment.name: experiment for experiment in experiments}
    verdicts = later.replicate.verdicts(experiments, scale, outcomes)
    if not verdicts:
        shows = f"canonlm report {out} shows them" if outcomes.keys() - exported.keys() else f"all are in {export}"
        say(f"nothing is judged, as no claim is registered for these runs; {shows}")
    for verdict in verdicts:
        experiment = by_name[verdict.experiment]
        say("\n".join(lines_of(later.claims.of_verdict(experiment, verdict, outcomes))))
        if other := later.replicate.of_another_version(experiment, scale, out, verdict.runs):
            say(f"     {other} of its runs were trained for another version of the experiment's file")
    failed = sorted(run for run, outcome in outcomes.items() if outcome is None)
    for run in failed:
        say(f"failed: {run}; {out / 'leases' / f'{run}.failures.json'} says why")
    return 1 if failed else 0


def _predict(out: Path, figures: Path | None) -> int:
    with doing("comparing rankings"):
        predictions = later.prediction.predictions()
    say("\n".join(later.prediction_page.lines_of(predictions)))
    with writing("--out", out):
        make_folder(out)
        write_text(out / "prediction.html", html := later.prediction_page.html(predictions))
    say(f"wrote {out / 'prediction.html'}")
    if figures is not None:
        later.figures.write_figures(html, figures)
        say(f"wrote figures, SVG and PDF: {figures}")
    return 0


def _print_estimates(estimates: "Sequence[later.replicate.Estimate]", scale: str, gpu: str) -> None:
    on_this_machine, on_the_gpu = "CPU hours here", f"hours of one {gpu}"
    cells = ["cells"] if scale == "paper" else []
    columns = ["runs", *cells, "done", "tokens", "FLOPs", on_this_machine, on_the_gpu]
    table = Table("experiment", *columns, box=None, padding=(0, 2, 0, 0))
    total = [0, 0, 0, 0, 0.0, 0.0, 0.0]
    for each in estimates:
        numbers = [each.cost.runs, each.cells, each.done, each.cost.tokens, each.cost.flops, each.cost.cpu_hours,
                   each.cost.hours]  # fmt: skip
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        table.add_row(each.experiment.name, *_numbers(numbers, scale))
    if len(estimates) > 1:
        table.add_row("all", *_numbers(total, scale))
    Console(soft_wrap=True).print(table)
    say(
        "Runs of an earlier line are not counted again. Fresh seeds: of the first look. GPU hours: at 40 % of its peak."
    )


def _numbers(numbers: Sequence[float], scale: str) -> list[str]:
    runs, cells, done, tokens, flops, hours, gpu_hours = numbers
    counts = [f"{runs:,}", *([f"{cells:,}"] if scale == "paper" else []), f"{done:,}"]
    return [
        *counts,
        f"{tokens:.2e}",
        f"{flops:.2e}",
        *(f"{each:,.1f}" if each < 1e6 else f"{each:.1e}" for each in (hours, gpu_hours)),
    ]

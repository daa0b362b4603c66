"""Where should Canon layers go? Every placement on the tiny tasks and on text, at its best of three learning rates.

    python benchmarks/placements.py run [--tasks depo,brevo,mano,lano,text] [--jobs 2]   days on two cores
    python benchmarks/placements.py time            step times of all placements, taking turns; on an idle machine
    python benchmarks/placements.py table           the results so far

`run` adds a line to benchmarks/results/placements.csv for every evaluation of a finished run, and does not repeat a run
that has lines. Runs of a tuning seed, whose data and test questions no other run sees, choose the learning rate of a
placement; on text by their mean training loss at the end, as every window is new. Seeds 0 to 4 then run at that rate,
and only they are reported. Differences are paired by seed, with 95 % t-intervals.
"""

import argparse
import csv
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, median

from canonlm.core.files import write_text
from canonlm.experiments.outcomes import accuracy
from canonlm.runs.rows import evaluation
from canonlm.runs.seed_statistics import t_interval

RESULTS = Path(__file__).parent / "results"
ROWS, TIMES = RESULTS / "placements.csv", RESULTS / "placements-time.json"
SITES = ["", *("A", "B", "C", "D", "K", "V", "O", "M", "E:smear", "K:offset"), *("ABCD", "AC", "KVOM", "KV", "BD")]
RATES = {
    "depo": (3e-4, 1e-3, 3e-3),
    **dict.fromkeys(("brevo", "mano", "lano"), (6e-4, 2e-3, 6e-3)),
    "text": (1e-3, 3e-3, 1e-2),
}
TUNING, SEEDS = 100, range(5)
TEXT_STEPS = 20_000_000 // (16 * 256)
FIELDS = ("task", "sites", "lr", "seed", "step", "steps", "score", "loss", "train_loss")


def arch(sites: str) -> str:
    return "llama" + (f"+canon={sites}" if sites else "")


def config_of(task: str, sites: str, lr: float, seed: int):
    from canonlm.launch.recipes import load_preset, recipes
    from canonlm.train.config import resolve
    from canonlm.train.load_config import load, merge

    changes = {"arch": arch(sites), "train": {"seed": seed, "optim": {"lr": lr}, "num_threads": 1}}
    if task != "text":
        return resolve(merge(load_preset(task, "tiny").run, changes))
    more = {"train": {"steps": TEXT_STEPS, "eval_every": TEXT_STEPS // 20, "checkpoint_every": TEXT_STEPS // 20}}
    return resolve(merge(merge(load(recipes()["debug"]).model_dump(exclude_unset=True), changes), more))


def one(task: str, sites: str, lr: float, seed: int) -> list[dict]:
    """Train one run in a temporary folder; returns its lines."""
    import torch

    from canonlm.train.loop import train

    torch.set_num_threads(1)
    config = config_of(task, sites, lr, seed)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [row["loss"] for row in rows if row["kind"] == "train" and row["step"] > 0.9 * config.train.steps]
    lines = []
    for row in rows:
        if row["kind"] == "eval":
            # The accuracy on the primary scale; for Lano, that of sentences from the start.
            score = accuracy(evaluation(row), ["from=start"] if task == "lano" else []) if row.get("slices") else None
            line = (task, sites, lr, seed, row["step"], config.train.steps, score, row.get("loss"), mean(last))
            lines.append(dict(zip(FIELDS, line, strict=True)))
    return lines


# -- rows -------------------------------------------------------------------------------------------------------------


def read_rows() -> list[dict]:
    if not ROWS.is_file():
        return []
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {"lr": float(row["lr"]), "seed": int(row["seed"])}
        row |= {key: int(row[key]) for key in ("step", "steps")}
        row |= {key: float(row[key]) if row[key] else None for key in ("score", "loss", "train_loss")}
    return rows


def write_rows(rows: list[dict]) -> None:
    def text(value: object) -> str:
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    lines = [",".join(FIELDS), *(",".join(text(row[key]) for key in FIELDS) for row in rows)]
    write_text(ROWS, "\n".join(lines) + "\n")


def final(rows: list[dict]) -> dict[tuple, dict]:
    """The last evaluation of each run, by (task, sites, lr, seed)."""
    return {tuple(row[key] for key in FIELDS[:4]): row for row in rows if row["step"] == row["steps"]}


def best_rate(ends: dict[tuple, dict], task: str, sites: str) -> float | None:
    """The learning rate that the tuning runs choose; None until all rates have been tried."""
    tried = [ends.get((task, sites, lr, TUNING)) for lr in RATES[task]]
    if None in tried:
        return None
    key = "train_loss" if task == "text" else "score"
    return (min if task == "text" else max)(tried, key=lambda row: row[key])["lr"]


# -- running ----------------------------------------------------------------------------------------------------------


def waiting(rows: list[dict], tasks: list[str]) -> list[tuple]:
    """Runs that can start now, in order: a task's tuning runs, then its seeds, one seed of all placements at a time."""
    ends = final(rows)
    jobs = []
    for task in tasks:
        jobs += [(task, sites, lr, TUNING) for sites in SITES for lr in RATES[task]]
        chosen = {sites: best_rate(ends, task, sites) for sites in SITES}
        jobs += [(task, sites, chosen[sites], seed) for seed in SEEDS for sites in SITES if chosen[sites]]
    return [job for job in jobs if job not in ends]


def run(tasks: list[str], jobs: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {}
        while True:
            open_jobs = [job for job in waiting(read_rows(), tasks) if job not in running.values()]
            for job in open_jobs[: jobs - len(running)]:
                running[pool.submit(one, *job)] = job
            if not running:
                return
            done = next(as_completed(running))
            job = running.pop(done)
            write_rows([*read_rows(), *done.result()])
            print(f"{time.strftime('%H:%M')} {job}: {done.result()[-1]['score']}", flush=True)


def measure_time(rounds: int = 30) -> None:
    """Time a training step of every placement, in turns: medians, and ratios to no Canon in the same round."""
    import torch

    from canonlm.train.build import build_model

    torch.set_num_threads(1)
    models = {}
    for sites in SITES:
        config = config_of("depo", sites, 1e-3, 0)
        models[sites] = build_model(config, "cpu")
    ids = torch.randint(0, models[""].module.config.vocab_size, (64, 64))
    seconds = {sites: [] for sites in SITES}
    for _ in range(rounds):
        for sites, model in models.items():
            start = time.perf_counter()
            model.loss(ids, ids, None, ids.numel()).total.backward()
            seconds[sites].append(time.perf_counter() - start)
    ratios = {s: median(a / b for a, b in zip(seconds[s], seconds[""], strict=True)) for s in SITES}
    result = {"rounds": rounds, "shape": "tiny: 2 layers, width 128, 64 x 64 tokens, fp32, one thread, eager"}
    result |= {
        "seconds": {s or "none": median(seconds[s]) for s in SITES},
        "ratio": {s or "none": ratios[s] for s in SITES},
    }
    write_text(TIMES, json.dumps(result, indent=1) + "\n")
    for sites in SITES:
        print(f"{sites or 'none':10s} {ratios[sites]:.3f}")


# -- the table --------------------------------------------------------------------------------------------------------


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.3f} (one seed)"
    low, high = t_interval(values)
    return f"{mean(values):+.3f} [{low:+.3f}, {high:+.3f}] ({len(values)} seeds)"


def at_equal_time(rows: list[dict], run: tuple, ratio: float) -> float | None:
    """The run's score at the time when a run without Canon would have ended, interpolated between evaluations."""
    points = sorted((row["step"], value_of(row)) for row in rows if tuple(row[key] for key in FIELDS[:4]) == run)
    target = points[-1][0] / ratio
    for (before, low), (after, high) in itertools.pairwise([(0, points[0][1]), *points]):
        if before <= target <= after:
            return low + (high - low) * (target - before) / (after - before)
    return points[-1][1]


def value_of(row: dict) -> float:
    return row["loss"] if row["task"] == "text" else row["score"]


def table() -> None:
    rows = read_rows()
    ends = final(rows)
    ratios = json.loads(TIMES.read_text())["ratio"] if TIMES.is_file() else {}
    for task in RATES:
        chosen = {sites: best_rate(ends, task, sites) for sites in SITES}
        done = {sites: [s for s in SEEDS if (task, sites, chosen[sites], s) in ends] for sites in SITES}
        tuned = sum((task, sites, lr, TUNING) in ends for sites in SITES for lr in RATES[task])
        print(f"\n{task}: {tuned} of {3 * len(SITES)} tuning runs, {sum(map(len, done.values()))} of 80 final runs")
        for sites in SITES:
            if not done[sites]:
                continue
            runs = {seed: (task, sites, chosen[sites], seed) for seed in done[sites]}
            line = f"  {sites or 'none':10s} lr {chosen[sites]:g}  {mean(value_of(ends[r]) for r in runs.values()):.3f}"
            pairs = {seed: (task, "", chosen[""], seed) for seed in runs if seed in done[""]}
            if sites and pairs:
                line += f"  {interval([value_of(ends[runs[s]]) - value_of(ends[pairs[s]]) for s in pairs])}"
                if sites in ratios:
                    early = [at_equal_time(rows, runs[s], ratios[sites]) - value_of(ends[pairs[s]]) for s in pairs]
                    line += f"  at equal time {interval(early)}"
            print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "time", "table"])
    parser.add_argument("--tasks", default=",".join(RATES))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.what == "run":
        run(options.tasks.split(","), options.jobs)
    else:
        {"time": measure_time, "table": table}[options.what]()

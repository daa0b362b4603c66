"""Synthetic play folders: the same files as those of real runs, with known numbers."""

import itertools
import json
import math
import random
from pathlib import Path

import yaml


def evaluation(step, slices, loss=2.0, measures=None):
    """`slices`: {("k", 1): (correct, total), …} → one eval row; `measures` as they are, if given."""
    entries = [{"slice": {key: value}, "correct": c, "total": n} for (key, value), (c, n) in slices.items()]
    total = sum(n for _, n in slices.values())
    row = {"kind": "eval", "step": step, "loss": loss, "slices": entries,
           "token_accuracy": sum(c for c, _ in slices.values()) / max(1, total)}  # fmt: skip
    return row if measures is None else row | {"measures": measures}


def write_run(
    folder: Path, *, arch="llama", lr=0.001, seed=0, task=None, evals=(), steps=None, finished=True, params=1_000_000,
    speed=60_000.0, config=None, losses=(), tail="", state=None
):  # fmt: skip
    folder.mkdir(parents=True)
    steps = steps if steps is not None else (evals[-1]["step"] if evals else 100)
    resolved = {
        "task": task or {"name": "depo", "max_n": 30, "max_k": 4},
        "arch": arch,
        "preset": "tiny",
        "data": {"seq_len": 512, "loss_on": "answer", "isolate_documents": False},
        "model": {"hidden_size": 128, "num_hidden_layers": 4},
        "train": {"steps": steps, "batch_size": 32, "seed": seed, "optim": {"lr": lr, "weight_decay": 0.1}},
    } | (config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))
    env = {"machine": "a laptop", "cores": 2, "torch": "2.13.0", "canonlm": "0.1.0", "python": "3.11.2"}
    (folder / "env.json").write_text(json.dumps(env))
    rows = [{"kind": "train", "step": step, "loss": loss, "lr": lr, "grad_norm": 0.8, "tokens_per_s": speed,
             "elapsed_s": step / 10} for step, loss in losses]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in sorted([*rows, *evals], key=lambda row: row["step"]))
    (folder / "metrics.jsonl").write_text(text + tail)
    if finished:
        result = {"steps": steps, "tokens": steps * 32 * 512, "num_parameters": params, "tokens_per_s": speed,
                  "train_seconds": 12.5, "final": evals[-1]}  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result if state is None else result | {"state_bytes": state}))
    return folder


FACTS = ("birth date", "birth city", "university", "field", "company city", "company")
EVERY_TASK = {
    "copying": ({"name": "copying", "N": 24}, [("first", 1), ("first", "all")]),
    "depo": ({"name": "depo", "N": 30, "K": 8}, [("k", k) for k in (1, 2, 4, 8)]),
    "brevo": ({"name": "brevo", "N": 70}, [("n", 70), *(("depth", d) for d in range(1, 7)),
              *(("nodes", text) for text in ("1-4", "5-8", "9-16", "17-32", "33-64"))]),
    "mano": ({"name": "mano", "L": 10}, [("l", 10)]),
    "mqar": ({"name": "mqar", "N": 16}, [("pairs", n) for n in (4, 8, 16)]),
    "lano": ({"name": "lano", "grammar": "cfg3f"}, [("from", "start"), ("from", "cut")]),
    "capo": ({"name": "capo", "people": 1000}, [*(("attribute", fact) for fact in FACTS),
             *(("question", fact) for fact in FACTS)]),
}  # fmt: skip


def capo_bits(share, params, people=1000):
    """The bits of a model that knows this share of everything about its people."""
    bits = 65.0 * share
    return {"bits_per_parameter": bits * people / params, "bits_per_person": bits, "bits_per_person_at_most": 65.0}


def write_runs(folder: Path, rows, **about):
    """`rows`: {arch: [the final evaluation of each seed]}. Returns the folders of the runs."""
    return [write_run(folder / "runs" / f"{arch}{seed}", arch=arch, seed=seed, evals=[row], **about)
            for arch, of_seeds in rows.items() for seed, row in enumerate(of_seeds)]  # fmt: skip


def write_every_task(
    folder: Path, tasks=tuple(EVERY_TASK), rates=(0.001, 0.003), seeds=(0, 1), sizes=(40_000, 160_000), measures=True,
    play=None, chance=None
):  # fmt: skip
    """One section per task; Capo at several sizes. Deterministic. Without `measures`: rows of earlier versions. `play`:
    more keys of `play.json`; `chance`: of the sections."""
    draw, archs = random.Random(11), ("llama", "llama+canon")
    sections = []
    for task in tasks:
        (spec, slices), names = EVERY_TASK[task], []
        for size, arch, lr, seed in itertools.product(sizes if task == "capo" else (64_000,), archs, rates, seeds):
            canon = "canon" in arch
            params = size + canon * size // 80
            ease = (1.0 if canon else 0.55) * (1.0 if lr == 0.003 else 0.9) * min(1.0, size / 100_000 + 0.4)
            evals = []
            for step in range(0, 1001, 100):
                learned = ease * (1 - math.exp(-step / 350)) * draw.uniform(0.95, 1.0)
                result = {}
                for rank, key in enumerate(slices):
                    total = 1000 if key[0] in ("n", "l") else 250
                    share = learned * 0.93**rank
                    result[key] = (sum(draw.random() < share for _ in range(total)), total)
                numbers = {"capo": capo_bits(learned, params), "lano": {"kl": 1.2 * math.exp(-6 * learned)}}.get(task)
                evals.append(evaluation(step, result, measures=numbers if measures else None))
            name = f"{task}-{arch}-{size}-lr{lr:g}-seed{seed}"
            model = {"hidden_size": 64 if size < 100_000 else 128, "num_hidden_layers": 4}
            write_run(folder / "runs" / name, arch=arch, lr=lr, seed=seed, task=spec, evals=evals, params=params,
                      losses=[(row["step"], 3 - row["step"] / 500) for row in evals],
                      config={"model": model})  # fmt: skip
            names.append(name)
        sections.append({"heading": task.capitalize(), "text": "", "runs": names, "chance": chance or {}})
    (folder / "play.json").write_text(json.dumps({"title": "All tasks", "sections": sections} | (play or {})))
    return folder


def write_demo(folder: Path) -> Path:
    """Copying, then Depo, at three learning rates with three seeds."""
    play = {"title": "Do Canon layers help a small Llama?", "command": "canonlm play demo --arch llama,llama+canon"}
    return write_every_task(folder, ("copying", "depo"), rates=(0.001, 0.003, 0.01), seeds=(0, 1, 2), play=play,
                            chance={f"k={k}": 0.125 for k in (1, 2, 4, 8)})  # fmt: skip


def text_evaluation(step, sets):
    """`sets`: {name: (loss, bits per byte, tokens)} → one eval row of a run on text."""
    total = sum(tokens for _, _, tokens in sets.values())
    loss = sum(loss * tokens for loss, _, tokens in sets.values()) / max(1, total)
    result = {name: {"loss": loss, "bits_per_byte": bits, "tokens": n} for name, (loss, bits, n) in sets.items()}
    return {"kind": "eval", "step": step, "loss": loss, "sets": result}


def write_text_run(folder: Path, *, sources=None, contents=None, evals=(), config=None, **kwargs):
    """`sources`: {name: (path, weight)}; `contents`: {name: sha256}, as in `data.json`."""
    sources = sources or {"web": ("data/web", 1.0)}
    text = {"sources": {name: {"path": path, "weight": weight} for name, (path, weight) in sources.items()}}
    model = {"num_hidden_layers": 2, "hidden_size": 64}
    write_run(folder, evals=evals, config={"task": None, "text": text, "model": model} | (config or {}), **kwargs)
    if contents is not None:
        noted = {f"text.sources.{name}.path": {"folder": "", "sha256": sha} for name, sha in contents.items()}
        (folder / "data.json").write_text(json.dumps(noted))
    return folder


def write_results(folder: Path, model, entries):
    """`results.json` of `canonlm eval`. `entries`: (suite, name, settings, scores), with scores of (measure, value,
    stderr, n, slice, share)."""
    keys = ("measure", "value", "stderr", "n", "slice", "share")
    results = [
        {"suite": suite, "name": name, "settings": settings,
         "scores": [dict(zip(keys, score, strict=True)) | {"higher_is_better": True} for score in scores]}
        for suite, name, settings, scores in entries
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"model": model, "results": results}))

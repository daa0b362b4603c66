"""Every causal model of the installed transformers as `hf:TYPE`: does it train, resume, evaluate and generate here?

    python benchmarks/hf_coverage.py            # all types: benchmarks/results/hf-coverage.json, docs/foreign-models.md
    python benchmarks/hf_coverage.py lfm2 rwkv  # some, printed

Each is built at the sizes of the tiny Depo preset, trained for three steps, saved, built again, loaded and compared at
the next step, evaluated on test windows and used to generate. One process runs many types, as imports take seconds; a
type that runs longer than LIMIT_S is a hang.
"""

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "hf-coverage.json", HERE.parent / "docs" / "foreign-models.md"
LIMIT_S = 60.0
BEGIN, END = "<!-- table: benchmarks/hf_coverage.py -->", "<!-- end of table -->"
FACTS = ("isolates", "cache", "padding", "saved")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.types)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = run(arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    counts = {
        kind: sum(row["outcome"] == kind for row in rows.values()) for kind in ("works", "refused", "traceback", "hang")
    }
    print(counts)
    if not arguments.types:
        import transformers

        data = {"transformers": transformers.__version__, "counts": counts, "types": rows}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        write_table(data)


def write_table(data: dict) -> None:
    """Write the table into the page, between its two markers."""
    counts = data["counts"]
    lines = [
        f"transformers {data['transformers']}: {counts['works']} of {len(data['types'])} types work, "
        f"{counts['refused']} are refused in one line. Each was built at the sizes of the tiny Depo preset, trained "
        "for three steps, resumed, evaluated and asked to generate (`benchmarks/hf_coverage.py`).",
        "",
        "| type | isolates documents | generation | transformers loads what it saves |",
        "|---|---|---|---|",
    ]
    for name, row in data["types"].items():
        if row["outcome"] == "works":
            how = [
                word for key, word in {"cache": "no cache", "padding": "one length at a time"}.items() if not row[key]
            ]
            cells = ["yes" if row["isolates"] else "no", ", ".join(how), "yes" if row["saved"] else "no"]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "| refused | why |", "|---|---|"]
    for name, row in data["types"].items():
        if row["outcome"] != "works":
            why = row["why"].removeprefix(f"arch: hf:{name} ").partition("; set its fields")[0]
            lines.append(f"| `{name}` | {why.replace('|', ' ')} |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


def run(types: list[str]) -> dict[str, dict]:
    """Rows by type. A process that hangs or dies is replaced by one for the remaining types."""
    rows: dict[str, dict] = {}
    left = list(types)
    while left:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", *left], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started = time.time()
        for line in _lines(process):
            if line is None:
                rows[left[0]] = {"outcome": "hang" if process.poll() is None else "traceback", "why": "no answer"}
                process.kill()
                left = left[1:]
                break
            row = json.loads(line)
            name = row.pop("type")
            rows[name] = row | {"seconds": round(time.time() - started, 1)}
            started = time.time()
            left.remove(name)
            detail = row.get("why") or " ".join(key for key in FACTS if not row[key])
            print(f"{name:28} {row['outcome']:10} {detail}", flush=True)
        process.wait()
    return rows


def _lines(process: subprocess.Popen):
    """Lines of a process as they come; None if it is silent for too long or fails."""
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=LIMIT_S)
        except queue.Empty:
            yield None
            return
        if line is None:
            if process.wait() != 0:
                yield None
            return
        if line.startswith("{"):
            yield line


def child(types: list[str]) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in types:
        try:
            row = try_type(name)
        except ValueError as error:
            known = "\n" not in str(error) and str(error).startswith(("arch: ", "unknown "))
            row = {"outcome": "refused", "why": str(error)} if known else failed(error)
        except Exception as error:
            row = failed(error)
        print(json.dumps({"type": name, **row}), flush=True)


def failed(error: Exception) -> dict:
    place = traceback.extract_tb(error.__traceback__)[-1]
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]} ({Path(place.filename).name}:{place.lineno})"
    return {"outcome": "traceback", "why": why}


def try_type(name: str) -> dict:
    import torch

    from canonlm.data.windows import WindowStream
    from canonlm.models.build import build
    from canonlm.models.causality import check
    from canonlm.models.interface import Sizes
    from canonlm.tasks import get
    from canonlm.train.evals.generate import generate
    from canonlm.train.evals.windows import WindowEval

    task = get("depo", N=8, K=2, name_vocab=8, min_name_len=1, max_name_len=1)
    sizes = Sizes(LAYERS.get(name, 2), 128, 4, len(task.vocab), 64)
    train, test = (WindowStream(task, split, 0, 64, "answer", isolate_documents=False) for split in ("train", "test"))

    def built():
        model = build(f"hf:{name}", sizes, seed=3)
        return model, torch.optim.AdamW(model.module.parameters(), lr=1e-3)

    def step(model, optimizer, index: int) -> float:
        batch = train.rows(8 * index, 8)
        model.module.train()
        torch.manual_seed(index)  # as in training, for models that draw random numbers
        total = model.loss(batch.input_ids, batch.targets, None, float((batch.targets != -100).sum())).total
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach())

    model, optimizer = built()
    check(model)
    try:
        check(model, isolated=True)
        isolates = True
    except ValueError:
        isolates = False
    losses = [step(model, optimizer, index) for index in range(3)]
    again, its_optimizer = built()
    again.module.load_state_dict(model.module.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert step(again, its_optimizer, 3) == step(model, optimizer, 3), "a resumed step has another loss"
    assert max(losses) < 2 * losses[0], f"losses {losses}"

    model.module.eval()
    loss = WindowEval(test, 8, 8).run(model, torch.device("cpu"))["loss"]
    prompts = [test.rows(0, 1).input_ids[0, :length].tolist() for length in (20, 13)]
    batches = [[prompt] for prompt in prompts] if model.reads_padding else [prompts]
    written = [tokens for batch in batches for tokens in generate(model, batch, 6, [], torch.device("cpu"))]
    assert written == [greedy(model, prompt) for prompt in prompts], "generation writes other tokens"
    return {
        "outcome": "works",
        "parameters": model.num_parameters,
        "isolates": isolates,
        "cache": model.generate.works.cache,
        "padding": model.generate.works.padding,
        "loss": round(loss, 4),
        "saved": saved(model),
    }


def greedy(model, prompt: list[int]) -> list[int]:
    """Six greedy tokens by the definition: one forward pass over the whole row for each."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model.logits(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def saved(model) -> bool:
    """Whether transformers loads what it saves, with the same logits."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(16)[None]
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.module.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
            return torch.allclose(loaded(ids).logits, model.logits(ids), atol=1e-4)
    except Exception:
        return False


LAYERS: dict[str, int] = {}
"""Numbers of layers of hybrids that need more than two to have every kind of layer."""

if __name__ == "__main__":
    main()

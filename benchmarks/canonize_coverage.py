"""Which causal models of the installed transformers can have Canon layers, and do they still work as before?

    python benchmarks/canonize_coverage.py             # all types: benchmarks/results/canonize-coverage.json
    python benchmarks/canonize_coverage.py gpt2 phi3   # some, printed
    python benchmarks/canonize_coverage.py --quick     # without the cases of `canonlm check`
    python benchmarks/canonize_coverage.py --update gpt2   # replaces these rows of the results
    python benchmarks/canonize_coverage.py --train     # 30 steps on Depo for every handled type of the results

Each type is built small, with random weights, and gets the sites AC, then ABCD without those that are refused. While
its Canon layers are zero, logits and greedy tokens must equal the host's, bit for bit. With random taps, no case of
`canonlm check` may be worse than for the host, and every tap must get a gradient. Each type has a process of its own,
so that a hang does not stop the others.
"""

import argparse
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "canonize-coverage.json"
LIMIT_S = 240
LAYERS = {"gemma3n_text": 4}
_DECODER = "{is_decoder=true,pad_token_id=0}"
OPTIONS = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"), _DECODER
    ),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"), _DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _DECODER),
    "xmod": "{is_decoder=true,pad_token_id=0,default_language=en_XX}",
    "falcon_h1": "{mamba_d_ssm=64,mamba_n_heads=4,mamba_d_head=16,mamba_n_groups=1}",
}
"""Fields for types that by default are encoders, or cannot be built at the small sizes."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()

    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.train:
        return train_all(arguments.types)
    rows = {}
    for name in arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[name] = row = in_a_process(lambda name=name: try_type(name, arguments.quick))
        print(f"{name:28} {row['outcome']:10} {summary(row)}", flush=True)
    if arguments.update:
        rows = json.loads(RESULTS.read_text())["types"] | rows
    counts = count(rows)
    print(json.dumps(counts, indent=1))
    if (arguments.update or not arguments.types) and not arguments.quick:
        data = {"transformers": transformers.__version__, "counts": counts, "types": rows}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")


def summary(row: dict) -> str:
    if row["outcome"] != "handled":
        return row["why"]
    parts = [row["sites"]]
    for sites in ("AC", "most"):
        for key in ("not the host", "no gradient", "worse"):
            if row[sites].get(key):
                parts.append(f"{sites}: {key}: {row[sites][key]}")
    if row["refused"]:
        parts.append("refused: " + "; ".join(row["refused"].values()))
    return " ".join(parts)


def is_right(part: dict) -> bool:
    return not any(part.get(key) for key in ("not the host", "no gradient", "worse"))


def count(rows: dict[str, dict]) -> dict[str, int]:
    handled = [row for row in rows.values() if row["outcome"] == "handled"]
    right = [row for row in handled if is_right(row["most"])]
    return {
        **{
            k: sum(row["outcome"] == k for row in rows.values())
            for k in ("handled", "refused", "not built", "traceback", "hang")
        },
        "AC": sum("A" in row["sites"] and "C" in row["sites"] for row in handled),
        "AC, no worse than the host": sum(is_right(row["AC"]) for row in handled if {"A", "C"} <= {*row["sites"]}),
        "ABCD": sum(row["sites"] == "ABCD" for row in handled),
        "ABCD, no worse than the host": sum(row["sites"] == "ABCD" for row in right),
        "ABCD or some of it, no worse than the host": len(right),
    }


def train_all(types: list[str]) -> None:
    """Train `types`, or the handled types that have not been trained yet; results are written after each."""
    data = json.loads(RESULTS.read_text())
    handled = {name: row for name, row in data["types"].items() if row["outcome"] == "handled"}
    for name in types or [name for name in handled if "training" not in handled[name]]:
        row = in_a_process(lambda name=name: trained(name, handled[name]["sites"]))
        handled[name]["training"] = {key: value for key, value in row.items() if key != "seconds"}
        print(f"{name:28} {row}", flush=True)
        ran = [row["training"] for row in handled.values() if "training" in row]
        data["counts"]["30 steps on Depo"] = sum(row.get("last") is not None for row in ran)
        data["counts"]["30 steps on Depo, the loss fell"] = sum(
            (row.get("last") or 9) < row.get("first", 0) for row in ran
        )
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data["counts"], indent=1))


def trained(name: str, sites: str) -> dict:
    """Mean losses of the first five and the last five of 30 training steps."""
    import tempfile

    from canonlm.launch.recipes import load_preset
    from canonlm.train.config import resolve
    from canonlm.train.load_config import merge
    from canonlm.train.loop import train

    changes = {
        "arch": f"hf:{name}{OPTIONS.get(name, '')}+canon={sites}",
        "model": {"hidden_size": 64, "num_hidden_layers": LAYERS.get(name, 4)},
        "train": {"steps": 30, "batch_size": 16, "log_every": 1, "eval_every": 30, "eval_size": 8, "num_threads": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        train(resolve(merge(load_preset("depo", "tiny").run, changes)), Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]
    assert len(losses) == 30
    return {"first": round(sum(losses[:5]) / 5, 4), "last": round(sum(losses[-5:]) / 5, 4)}


def in_a_process(make: Callable[[], dict]) -> dict:
    """Call `make` in a fork of this process and return its result."""
    reading, writing = os.pipe()
    started = time.time()
    if (child := os.fork()) == 0:
        os.close(reading)
        signal.alarm(LIMIT_S)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        try:
            row = make()
        except Exception as error:
            row = failed(error)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(row))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    row = json.loads(text) if text else {"outcome": "hang", "why": f"no answer in {LIMIT_S} s"}
    return row | {"seconds": round(time.time() - started, 1)}


def failed(error: Exception) -> dict:
    place = traceback.extract_tb(error.__traceback__)[-1]
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(place.filename).name}:{place.lineno})"
    return {"outcome": "traceback", "why": why}


def try_type(name: str, quick: bool) -> dict:
    from canonlm.canonize import describe
    from canonlm.core.errors import InvalidSetting

    try:
        host = built(name)
    except Exception as error:
        return {"outcome": "not built", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    sites, refused = "ABCD", {}
    while sites:
        try:
            describe(host, sites)
            break
        except InvalidSetting as error:
            letter = str(error).partition("sites: no ")[2][:1]
            if letter not in ("A", "C", "D", "Q", "K", "V"):
                return {"outcome": "refused", "why": str(error)}
            refused["B" if letter in "QKV" else letter] = str(error)
            sites = sites.replace("B" if letter in "QKV" else letter, "")
    if not sites:
        return {"outcome": "refused", "why": "; ".join(refused.values())}
    row = {"outcome": "handled", "sites": sites, "refused": refused}
    row["most"] = compared(name, host, sites, quick)
    both = "".join(letter for letter in "AC" if letter in sites)
    right = is_right(row["most"])
    row["AC"] = compared(name, host, both, quick or right) if both else {}
    return row


def built(name: str):
    """The host, with weights large enough that a wrong token shows."""
    import torch

    from canonlm.models.hf_small_configs import causal_config
    from canonlm.models.interface import Sizes

    sizes = Sizes(LAYERS.get(name, 4), 64, 4, 97, 64)
    model_class, config = causal_config(f"hf:{name}{OPTIONS.get(name, '')}", sizes)
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.shape[1] ** -0.5 * torch.randn(parameter.shape, generator=generator))
        model(torch.arange(8)[None])
    return model


def compared(name: str, host, sites: str, quick: bool) -> dict:
    import copy

    import torch

    from canonlm.canonize import canonize, check

    model = canonize(copy.deepcopy(host), sites)
    ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    row: dict = {}
    tokens, ours = greedy(host, ids), greedy(model, ids)
    same = {
        "logits": torch.equal(answers(host, ids), answers(model, ids)),
        "tokens": tokens is None or (ours is not None and torch.equal(tokens, ours)),
    }
    different = [what for what, is_same in same.items() if not is_same]
    row["not the host"] = ", ".join(different)
    generator = torch.Generator().manual_seed(2)
    taps = {path: p for path, p in model.named_parameters() if "canon_" in path}
    with torch.no_grad():
        for parameter in taps.values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    row["taps"] = len(taps)
    model.train()
    model(ids, labels=ids).loss.backward()
    row["no gradient"] = ", ".join([path for path, p in taps.items() if p.grad is None or not p.grad.any()][:3])
    model.zero_grad()
    model.eval()
    if quick:
        return row
    theirs, ours = ({one.case: one for one in check.decoding(each)} for each in (host, model))
    order = ("passed", "refused", "differs", "failed")
    worse = {
        case: f"{one.state} ({one.error if one.error is not None else one.detail[:150]})"
        for case, one in ours.items()
        if order.index(one.state) > order.index(theirs[case].state)
    }
    # A host may be right by luck: a case that it gets wrong for other tokens was not broken by Canon layers.
    for case in [case for case in worse if ours[case].state in ("differs", "failed")]:
        if any(check.decoding(host, [case], seed=seed)[0].state == ours[case].state for seed in (1, 2, 3, 4)):
            theirs[case] = ours[case]
            del worse[case]
    row["worse"] = worse
    row["host wrong"] = [case for case, one in theirs.items() if one.state == "differs"]
    return row


def answers(model, ids):
    import torch

    with torch.no_grad():
        return model(ids).logits


def greedy(model, ids):
    try:
        return model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    except Exception:  # the host's error, which `canonlm check` reports
        return None


if __name__ == "__main__":
    main()

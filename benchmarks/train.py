"""What training costs: our loop against transformers' Trainer, Canon's share of a step, the memory of the loss.

    python benchmarks/train.py [--device cuda] [--quick] [--only trainer,canon,loss] [--json FILE]

trainer   Tokens per second of both loops, taking turns after every few steps, so that a busy moment of the machine
          affects both: the same Llama and tokens, attention (sdpa), dtype, optimizer (fused AdamW, clipping) and
          logging; evaluations and checkpoints are not timed. The ratio is the median over the turns.
canon     CPU: one training step without the optimizer for each set of Canon sites, taking turns: the median over rounds
          of the extra time relative to the step without Canon in the same round. With OMP_NUM_THREADS=1 times are CPU
          time, which hardly depends on other work.
loss      Memory of the loss and its gradients, with all logits at once and in chunks, in a process each.

MFU: FLOPs of the model (canonlm.train.flops) over the peak of the device; on a CPU, over the speed of a large matrix
product in the same process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from canon import load, machine, passes_ms, save

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.data import index
from canonlm.data.shards import Dataset
from canonlm.data.text import TextStream
from canonlm.models.loss import loss_of_hidden, loss_of_logits
from canonlm.train.build import build_model
from canonlm.train.config import RunConfig, resolve
from canonlm.train.data import complete
from canonlm.train.flops import flops_per_token, peak_flops
from canonlm.train.loop import train
from canonlm.train.machine import keep_freed_memory, memory_gb

CPU = {"layers": 12, "hidden": 512, "heads": 8, "time": 512, "batch": 8, "vocab": 4096, "precision": "fp32"}
GPU = {"layers": 24, "hidden": 2048, "heads": 16, "time": 4096, "batch": 8, "vocab": 32000, "precision": "bf16"}
QUICK = {"layers": 2, "hidden": 64, "heads": 2, "time": 64, "batch": 4, "vocab": 512, "precision": "fp32"}
DECODER = {"layers": 12, "hidden": 512, "time": 512, "batch": 8}
QUICK_DECODER = {"layers": 4, "hidden": 128, "time": 128, "batch": 8}
SITES = ["", "AC", "ABCD"]
LOSS = {"vocab": 128256, "hidden": 512, "tokens": 4096}
QUICK_LOSS = {"vocab": 16032, "hidden": 64, "tokens": 512}
OPTIM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "decay": "all", "warmup_steps": 10}
TARGET = 1.1  # times the Trainer's speed
WARM_UP = 3  # turns


def tokens_on_disk(folder: Path, shape: dict) -> None:
    """Write random tokens in the format of `canonlm data prepare`, enough for fresh ones in every step."""
    count, name = 400 * shape["batch"] * shape["time"], "train-00000.ds"
    np.random.default_rng(0).integers(0, shape["vocab"], count, np.uint16).tofile(folder / name)
    np.array([count], "<u8").tofile(folder / f"{name}.index")
    sha256, ends_sha256 = (index.file_sha256(folder / file) for file in (name, f"{name}.index"))
    shard = index.Shard(name, tokens=count, documents=1, bytes=count, sha256=sha256, ends_sha256=ends_sha256)
    tokenizer = {"name": "tokenizer.json", "sha256": "0" * 64}
    described: dict[str, Any] = {"tokenizer": tokenizer, "bos_id": None, "eos_id": None}
    described |= {"splits": {"train": (shard,), "valid": ()}, "inputs": (), "bad_lines": 0, "command": {}}
    index.write(folder, index.Index(vocab_size=shape["vocab"], dtype="uint16", **described))


def our_run(arch: str, shape: dict, tokens: Path, device: str, compiled: bool, steps: int, log_every: int) -> RunConfig:
    sizes = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    settings = {
        "arch": arch,
        "text": {"sources": {"tokens": {"path": str(tokens)}}},
        "model": {field: shape[size] for size, field in sizes.items()},
        "data": {"seq_len": shape["time"]},
        "train": {
            "steps": steps,
            "batch_size": shape["batch"],
            "precision": shape["precision"],
            "compile": compiled,
            "device": device,
            "log_every": log_every,
            "eval_every": steps,
            "eval_size": 1,
            "checkpoint_every": steps,
            "optim": OPTIM,
        },
    }
    return complete(resolve(settings))


# -- our loop and the Trainer -----------------------------------------------------------------------------------------


class Turns:
    """Lets one loop work at a time: it hands over after each log. `seconds`, `losses`: of each turn, by loop."""

    def __init__(self, names: list[str]) -> None:
        self._may_work = {name: threading.Event() for name in names}
        self._next = dict(zip(names, names[1:] + names[:1], strict=True))
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.losses: dict[str, list[float]] = {name: [] for name in names}
        self._may_work[names[0]].set()

    def begin(self, name: str) -> None:
        self._may_work[name].wait()
        self._may_work[name].clear()
        self._started = time.perf_counter()

    def logged(self, name: str, loss: float) -> None:
        self.seconds[name].append(time.perf_counter() - self._started)
        self.losses[name].append(loss)
        self.end(name)
        self.begin(name)

    def end(self, name: str) -> None:
        self._may_work[self._next[name]].set()


def ours(run: RunConfig, log: Callable[[float], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(run, Path(folder), lambda row: log(row["loss"]) if row["kind"] == "train" else None)


def theirs(run: RunConfig, log: Callable[[float], None]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Logged(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                log(float(logs["loss"]))

    config, settings = build_model(run, "meta").module.config, run.train
    model = transformers.LlamaForCausalLM(llama_config(config))
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config), "not the same Llama"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.optim.lr,
            adam_beta1=settings.optim.betas[0],
            adam_beta2=settings.optim.betas[1],
            adam_epsilon=settings.optim.eps,
            weight_decay=settings.optim.weight_decay,
            max_grad_norm=settings.optim.grad_clip,
            warmup_steps=settings.optim.warmup_steps,
            lr_scheduler_type="cosine",
            optim="adamw_torch_fused",
            bf16=settings.precision == "bf16",
            torch_compile=settings.compile,
            use_cpu=settings.device == "cpu",
            logging_steps=settings.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=in_memory(run), callbacks=[Logged()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def llama_config(config: CanonLMConfig) -> transformers.LlamaConfig:
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return transformers.LlamaConfig(
        **{name: getattr(config, name) for name in same},
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )


def num_parameters(config: CanonLMConfig) -> int:
    from canonlm import CanonLMForCausalLM

    with torch.device("meta"):
        return CanonLMForCausalLM(config).num_parameters()


def in_memory(run: RunConfig) -> list[dict]:
    """The windows that our loop reads, as the Trainer's dataset, drawn before the timing starts."""
    assert run.text is not None
    source = {"tokens": (Dataset(run.text.sources["tokens"].path), "train", 1.0)}
    stream = TextStream(source, run.train.seed, run.data.seq_len, isolate_documents=False)
    ids = stream.rows(0, run.train.steps * run.train.batch_size).input_ids
    return [{"input_ids": row, "labels": row} for row in ids]


def against_the_trainer(shape: dict, tokens: Path, device: str, compiled: bool, turns: int, log_every: int) -> dict:
    run = our_run("llama", shape, tokens, device, compiled, steps=log_every * (turns + WARM_UP), log_every=log_every)
    torch._dynamo.reset()
    turn = Turns(["ours", "Trainer"])

    def work(name: str, loop: Callable[[RunConfig, Callable[[float], None]], None]) -> None:
        turn.begin(name)
        try:
            loop(run, lambda loss: turn.logged(name, loss))
        finally:
            turn.end(name)

    other = threading.Thread(target=work, args=("Trainer", theirs))
    other.start()
    work("ours", ours)  # in the main thread, where it handles signals
    other.join()

    mode, tokens_per_turn = "compiled" if compiled else "eager", log_every * shape["batch"] * shape["time"]
    speeds = {name: [tokens_per_turn / s for s in seconds[WARM_UP:]] for name, seconds in turn.seconds.items()}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = sorted(paired(speeds["ours"], speeds["Trainer"]))
    flops, peak = flops_per_token(build_model(run, "meta"), shape["time"]), peak_of(device, shape["precision"])
    result = {
        "mode": mode,
        "tokens_per_s": speeds,
        "median": medians,
        "losses": turn.losses,
        "mfu": {name: speed * flops / peak for name, speed in medians.items()},
        "peak_tflops": peak / 1e12,
        "ratio": statistics.median(ratios),
        "load_after": load(),
    }
    for name, speed in medians.items():
        detail = f"MFU {result['mfu'][name]:.1%}, loss {turn.losses[name][0]:.3f} to {turn.losses[name][-1]:.3f}"
        print(f"{mode:9} {name:8} {speed:12,.0f} tokens/s, {detail}", flush=True)
    spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{mode:9} ratio {result['ratio']:.3f} (target {TARGET}) of {spread}", flush=True)
    return result


def peak_of(device: str, precision: str) -> float:
    """The peak FLOP/s from the device's data sheet, or those of a large matrix product measured now."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if device == "cuda" and (known := peak_flops(torch.cuda.get_device_name(), dtype)):
        return known
    n, best = 2048, float("inf")
    a = torch.randn(n, n, dtype=dtype, device=device)
    for _ in range(5):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


# -- Canon's share ----------------------------------------------------------------------------------------------------


def decoder_steps(sizes: dict[str, int], threads: int, rounds: int, compiled: bool) -> dict:
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    ids_BT = torch.randint(0, 512, (sizes["batch"], sizes["time"]))
    steps = {}
    for sites in SITES:
        config = CanonLMConfig(
            vocab_size=512,
            hidden_size=sizes["hidden"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=8,
            canon_set=sites,
        )
        model = CanonLMForCausalLM(config).train()
        steps[sites or "none"] = partial(train_step, model, torch.compile(model) if compiled else model, ids_BT)
    mode = "compiled" if compiled else "eager"
    took = passes_ms(steps, rounds, time.process_time if threads == 1 else time.perf_counter)
    overhead = {name: statistics.median(paired(took[name], took["none"])) - 1 for name in steps}
    for name, passes in took.items():
        spread = ", ".join(f"{ratio - 1:+.1%}" for ratio in sorted(paired(passes, took["none"])))
        print(f"{mode:9} {name:6} best {min(passes):8.1f} ms  {overhead[name]:+7.1%}  ({spread})", flush=True)
    return {"mode": mode, "threads": threads, "layers": sizes["layers"], "ms": took, "overhead": overhead}


def paired(passes: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(passes, others, strict=True)]


def train_step(model: CanonLMForCausalLM, forward: Callable, ids_BT: torch.Tensor) -> None:
    model.zero_grad()
    forward(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()


# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_memory(form: str, sizes: dict, device: str) -> dict:
    """The memory that the loss and its gradients take in this process, beyond hidden states and head weights."""
    where = torch.device(device)
    config = CanonLMConfig(vocab_size=sizes["vocab"], hidden_size=sizes["hidden"])
    generator = torch.Generator().manual_seed(0)
    h_BTD = torch.randn(1, sizes["tokens"], sizes["hidden"], generator=generator).to(where).requires_grad_()
    weight_VD = (torch.randn(sizes["vocab"], sizes["hidden"], generator=generator) * 0.02).to(where).requires_grad_()
    targets_BT = torch.randint(sizes["vocab"], (1, sizes["tokens"]), generator=generator).to(where)
    before, start = memory_gb(where), time.perf_counter()
    if form == "chunked":
        loss, _ = loss_of_hidden(config, h_BTD, weight_VD, targets_BT)
    else:
        loss, _ = loss_of_logits(config, h_BTD @ weight_VD.mT, targets_BT)
    mean = loss / sizes["tokens"]
    mean.backward()
    assert weight_VD.grad is not None
    result = {"loss": float(mean), "gradient": float(weight_VD.grad.norm()), "seconds": time.perf_counter() - start}
    after = memory_gb(where)
    assert before is not None
    assert after is not None
    return {"form": form, "gb": after - before, **result}


def losses(sizes: dict, device: str) -> dict:
    rows = {}
    for form in ("plain", "chunked"):
        command = [sys.executable, __file__, "--device", device, "--loss", json.dumps({"form": form, "sizes": sizes})]
        rows[form] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)
        print(f"{form:8} {rows[form]['gb']:6.2f} GB {rows[form]['seconds']:6.1f} s", flush=True)
    ratio = rows["plain"]["gb"] / rows["chunked"]["gb"]
    print(f"the plain form takes {ratio:.1f} times the memory", flush=True)
    return {"sizes": sizes, **rows, "memory_ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, eager only: does it run?")
    parser.add_argument("--only", default="trainer,canon,loss", help="parts, separated by commas")
    parser.add_argument("--layers", type=int, help="layers of the decoder in the part `canon` (default: 12)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--loss", help=argparse.SUPPRESS)  # for the processes of `losses`
    options = parser.parse_args()
    if options.loss:
        print(json.dumps(loss_memory(**json.loads(options.loss), device=options.device)))
        return
    keep_freed_memory()  # as `canonlm train` does
    device, quick, parts = options.device, options.quick, options.only.split(",")
    shape = QUICK if quick else {"cpu": CPU, "cuda": GPU}[device]
    transformers.logging.set_verbosity_error()
    result: dict = {"machine": machine(), "shape": shape}
    if device == "cuda":
        result["machine"]["device"] = torch.cuda.get_device_name()
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(", ".join(f"{key} {value}" for key, value in shape.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder)
        tokens_on_disk(tokens, shape)
        if "trainer" in parts:
            print("\nOur loop and transformers' Trainer")
            result["trainer"] = []
            for compiled in (False,) if quick else (False, True):
                turns, log_every = (16, 4) if device == "cuda" else (12, 1)
                result["trainer"].append(against_the_trainer(shape, tokens, device, compiled, turns, log_every))
                save(result, options.json)
        if "canon" in parts and device == "cpu":
            print("\nOne training step without the optimizer, by Canon sites")
            sizes, rounds = (QUICK_DECODER, 3) if quick else (DECODER, 9)
            sizes = sizes | ({"layers": options.layers} if options.layers else {})
            modes = (False,) if quick else (False, True)
            result["canon"] = [decoder_steps(sizes, torch.get_num_threads(), rounds, mode) for mode in modes]
            save(result, options.json)
        if "loss" in parts:
            sizes = QUICK_LOSS if quick else LOSS
            print(f"\nThe loss and its gradients, beyond their inputs: {sizes}")
            result["loss"] = losses(sizes, device)
            save(result, options.json)


if __name__ == "__main__":
    main()

"""Losses, to the bit, of runs of every tiny preset, the demo and `debug`, which refactoring must not change.

    python tests/train/record_losses.py     # writes recorded_losses.json beside this file

Run it before the change; `test_recorded_losses.py` compares.
"""

import json
import platform
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from canonlm.launch.recipes import find, load_preset
from canonlm.train.config import resolve
from canonlm.train.load_config import load, merge
from canonlm.train.loop import train
from canonlm.train.machine import cpu_name

FILE = Path(__file__).with_name("recorded_losses.json")
SHORT = {
    "steps": 60,
    "log_every": 1,
    "eval_every": 60,
    "checkpoint_every": 60,
    "optim": {"lr": 3e-3, "warmup_steps": 10},
}
TINY = {
    "copying": "llama+alibi=hard+mlp=standard+relu2",
    "depo": "gdn2.llama+canon",
    "brevo": "gla5+canon",
    "mano": "mamba2+canon=A",
    "mqar": "llama+rope=0.5x0.5+mlp=moe",
    "lano": "llama-nope+canon=AC+qknorm",
    "capo": "retention+canon",
}
DEMO = [("copying", "llama+canon=A"), ("depo", "llama"), ("depo", "llama+canon")]
STEPS = {"tiny": 60, "demo": 100, "debug": 40}
"""The number of steps that are compared; runs may be longer."""
PYTHON = platform.python_version()
"""`debug` reads the source of this Python."""


def runs():
    """Configurations by name."""
    for task, arch in TINY.items():
        yield f"tiny {task} {arch}", resolve(merge(load_preset(task, "tiny").run, {"arch": arch, "train": SHORT}))
    for task, arch in DEMO:
        yield f"demo {task} {arch}", resolve(merge(load_preset(task, "tiny").run, {"arch": arch}))
    yield "debug", load(find("debug"), ["train.log_every=1"])


class Enough(Exception):
    pass


def losses(name, config, steps=None):
    """`{step: [loss, grad_norm]}` of the first steps; of all that are recorded by default."""
    rows, last = {}, steps or STEPS[name.split()[0]]

    def note(row):
        if row["kind"] == "train":
            rows[str(row["step"])] = [row["loss"], row["grad_norm"]]
            if row["step"] >= last:
                raise Enough

    with TemporaryDirectory() as folder, suppress(Enough):
        train(config, Path(folder) / "run", note)
    return rows


def machine():
    """The properties of a machine that decide the last bits of a sum."""
    return {"cpu": cpu_name(), "vectors": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


if __name__ == "__main__":
    recorded = {name: losses(name, config) for name, config in runs()}
    FILE.write_text(json.dumps({"python": PYTHON, "machine": machine(), "runs": recorded}, indent=1) + "\n")

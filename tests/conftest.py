"""Configurations of very small runs, comparisons of two such runs, and processes that start quickly."""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter

import pytest
import yaml
from hypothesis import HealthCheck, settings

from canonlm.runs.rows import TIMINGS
from canonlm.train.config import resolve
from canonlm.train.load_config import merge

# The same examples every time, on a busy machine too.
settings.register_profile("tests", derandomize=True, deadline=None, max_examples=60,
                          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
settings.load_profile("tests")

SETTINGS = {
    "arch": "llama+canon",
    "task": {"name": "copying", "N": 8, "min_items": 2},
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 18, "loss_on": "answer"},
    "train": {
        "steps": 40,
        "batch_size": 4,
        "num_threads": 1,
        "log_every": 3,
        "eval_every": 8,
        "eval_size": 8,
        "checkpoint_every": 10,
        "optim": {"lr": 3e-3, "warmup_steps": 5},
    },
}


def pytest_configure():
    """`make test &` ignores Ctrl-C and `nohup` ignores SIGHUP; tests of signals would inherit that. Nothing that the
    collection makes is garbage, so it is not searched for any."""
    gc.disable()
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """In a test marked `every(n)`, the first case and every n-th after it are fast, and the others slow. The longest
    tests come first, as a worker that starts them last works alone."""
    items.sort(key=lambda item: item.path.name != "test_parallel.py")
    cases = Counter()
    for item in items:
        if mark := item.get_closest_marker("every"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker("slow")
            cases[test] += 1


def pytest_collection_finish():
    """Keep what has been imported out of garbage collections, which otherwise take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Every test has the same environment, so that tests of one worker share a `canonlm.launch.fork_server`. (The hook
    `pytest_runtest_call` is too early: pytest sets the variable after it.)"""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return (yield)


class Tiny:
    """Configurations of very small runs; `tiny(train={"steps": 20})`."""

    def raw(self, **changes):
        return merge(SETTINGS, changes)

    def __call__(self, **changes):
        return resolve(self.raw(**changes))

    def yaml(self, path, **changes):
        path.write_text(yaml.safe_dump(self.raw(**changes), sort_keys=False))
        return path

    @staticmethod
    def untimed(row):
        return {key: value for key, value in row.items() if key not in {*TIMINGS, "train_seconds"}}

    def rows(self, folder):
        """The rows of `metrics.jsonl` without timings."""
        return [self.untimed(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    @staticmethod
    def weights(folder):
        from canonlm.train.checkpoint import load_model  # imports torch, which many tests do not need

        return {name: tensor.numpy().tobytes() for name, tensor in load_model(folder).module.state_dict().items()}

    def same(self, folder, reference, *, saved_when_stopped=False):
        """Rows and final weights are equal, to the bit; nothing temporary is left; both have the same checkpoints.

        saved_when_stopped: a signal may have stopped the run at any step, and an older checkpoint may be of that step.
        """
        assert self.rows(folder) == self.rows(reference)
        assert self.weights(folder) == self.weights(reference)
        assert [path.name for path in folder.rglob("*") if ".tmp-" in path.name] == []
        checkpoints = [
            self.checkpoints(f)[-1:] if saved_when_stopped else self.checkpoints(f) for f in (folder, reference)
        ]
        assert checkpoints[0] == checkpoints[1]
        results = [json.loads((f / "result.json").read_text()) for f in (folder, reference)]
        assert self.untimed(results[0]) == self.untimed(results[1])

    @staticmethod
    def checkpoints(folder):
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    @staticmethod
    def back_to(folder, step):
        """The folder of a process that died after this checkpoint and before the next, but with all rows."""
        (folder / "result.json").unlink()
        for path in (folder / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)


@pytest.fixture(autouse=True)
def mixers_of_this_test():
    """Remove the mixers that a test loads from files, so that later tests do not see them."""
    yield
    if (base := sys.modules.get("canonlm.models.mixers.base")) is not None:
        for reference in [name for name in base.MIXERS if ":" in name]:
            del base.MIXERS[reference]


@pytest.fixture(scope="session")
def tiny():
    return Tiny()


@pytest.fixture(scope="session")
def reference(tiny, tmp_path_factory):
    """The folder of an uninterrupted run of `tiny()`, to compare with and to copy."""
    from canonlm.train.loop import train

    folder = tmp_path_factory.mktemp("reference")
    train(tiny(), folder)
    return folder


@pytest.fixture
def again(reference, tmp_path):
    """`tmp_path`, with a copy of that run in it."""
    return shutil.copytree(reference, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def knows():
    from known_model import Knows

    return Knows


@pytest.fixture(scope="session")
def start():
    """`start(target, *args)`: a process with torch already loaded, so that many can be killed quickly."""
    context = multiprocessing.get_context("forkserver")
    preloaded = ["canonlm.train.loop", "canonlm.cli", "pytest", "hypothesis", "torch.distributed.fsdp"]
    context.set_forkserver_preload(preloaded)

    def begin(target, *args):
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    return begin

"""The run that others are compared with, and processes that start quickly."""

import multiprocessing

import pytest

from canonlm.train.loop import train


@pytest.fixture(scope="session")
def reference(tiny, tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference")
    train(tiny(), folder)
    return folder


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

"""Tests that need a GPU. Without one they are skipped; CANONLM_REHEARSE=1 runs them at small sizes on the CPU (with the
kernels if TRITON_INTERPRET=1 is set), to try the tests themselves."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # the definitions that kernels are compared with
if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import correct_the_interpreter

    correct_the_interpreter()


@pytest.fixture(scope="session")
def device():
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("CANONLM_REHEARSE") != "1":
        pytest.skip("needs a GPU")
    return torch.device("cpu")


@pytest.fixture(scope="session")
def kernels(device):
    """The device, if Triton's kernels run on it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    return device


@pytest.fixture
def captured(device):
    """captured(call, times): a function that repeats the call `times` times; on a GPU, one CUDA graph."""

    def capture(call, times):
        def repeated():
            for _ in range(times):
                call()

        if device.type == "cpu":
            return repeated
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()  # compiles
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeated()
        return graph.replay

    return capture

"""`transformers serve` knows the library's own classes: a converted model is served, others are refused by name."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest


@pytest.fixture
def start(models, tmp_path):
    """Starts the server with a model; returns its process, its log and its address."""
    processes = []

    def begin(name):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [Path(sys.executable).with_name("transformers"), "serve", models / name, "--trust-remote-code"]
        log = tmp_path / "log.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        processes.append(process)
        return process, log, f"http://127.0.0.1:{port}"

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def test_a_converted_model_is_served(models, start):
    process, log, address = start("converted")
    while True:
        assert process.poll() is None, log.read_text()
        try:
            urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    prompt = [i * 7 % 120 + 1 for i in range(17)]
    body = {"model": str(models / "converted"), "prompt": " ".join(f"w{i}" for i in prompt), "max_tokens": 12}
    request = Request(
        f"{address}/v1/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=600) as answer:
        text = json.load(answer)["choices"][0]["text"]
    tokens, _ = json.loads((models / "converted" / "expected.json").read_text())[1]
    assert text.split() == [f"w{i}" for i in tokens]


@pytest.mark.parametrize(
    ("name", "missing"), [("llama", "CanonLMForCausalLM"), ("canon", "CanonLMForCausalLM"), ("canonized", "CanonHost")]
)
def test_other_classes_are_refused_by_name(start, name, missing):
    process, log, _ = start(name)
    assert process.wait(timeout=600) != 0
    assert f"module transformers has no attribute {missing}" in log.read_text()

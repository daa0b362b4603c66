"""Servers with our folders; `make test-serving` runs them in an environment of their own, without canonlm."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.serving)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    subprocess.run([sys.executable, HERE / "write_models.py", folder], env=environment, check=True)
    return folder

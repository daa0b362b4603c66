"""The kernels in Triton's interpreter, on CPU tensors; `make test-kernels` runs them in an environment of their own."""

import importlib.util
import os
import tempfile

import pytest
from hypothesis import Phase, settings

# A smaller failing case is not worth minutes of the interpreter.
settings.register_profile("kernels", phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("kernels")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.kernels)


if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import correct_the_interpreter

    correct_the_interpreter()
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="canonlm-kernels-")  # no tuned launches of this user's
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]

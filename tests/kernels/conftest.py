"""The kernels in Triton's interpreter, on CPU tensors; `make test-kernels` runs them in a separate environment.

pytest reads this file in every session, so nothing here may affect a session without the interpreter.
"""

import os
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if os.environ.get("TRITON_INTERPRET") == "1":
    from hypothesis import Phase, settings
    from interpreter import correct_the_interpreter

    correct_the_interpreter()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="canonlm-kernels-")  # not the user's tuned launches
    # Shrinking a failing case is not worth minutes in the interpreter.
    settings.register_profile("kernels", phases=[Phase.explicit, Phase.reuse, Phase.generate])
    settings.load_profile("kernels")
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kernels)

"""Compiled code and exported code know what they are."""

from pathlib import Path

import torch

import canonlm
from canonlm.ops.compiled import is_exporting


class Scaled(torch.nn.Module):
    def forward(self, x):
        return 2 * x if is_exporting() else 3 * x


def test_compiled_code_is_not_exported_code():
    """torch 2.11 folds its own function to True in both, so that compiled models used no kernel of ours."""
    model, x = Scaled(), torch.ones(2)
    compiled = torch.compile(model, backend="eager")
    for strict in (False, True):
        assert torch.export.export(model, (x,), strict=strict).module()(x).tolist() == [2, 2]
    assert compiled(x).tolist() == model(x).tolist() == [3, 3]


def test_only_one_module_asks_torch():
    asking = [
        path for path in Path(canonlm.__file__).parent.rglob("*.py") if "compiler.is_exporting" in path.read_text()
    ]
    assert [path.name for path in asking] == ["compiled.py"]

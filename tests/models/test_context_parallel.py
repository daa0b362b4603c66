"""Context parallelism: 2, 4 and 8 processes, each with a part of every window, compute what one does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from context_parallel_checks import CASES
from several_processes import results_of

from canonlm.models.build import build
from canonlm.models.interface import SMALL
from canonlm.models.mixers import MIXERS
from canonlm.models.mixers.retention import Retention

SCRIPT, SECONDS = Path(__file__).with_name("context_parallel_checks.py"), 300


@pytest.mark.slow
def test_several_processes_equal_one(tmp_path):
    errors = results_of(SCRIPT, tmp_path, seconds=SECONDS, environment={"OMP_NUM_THREADS": "1"})
    assert list(errors) == list(CASES)
    wrong = {
        case: (*found, name)
        for case, (*found, name) in errors.items()
        if not all(error < (1e-10 if "float64" in case else 1e-5) for error in found)  # of the loss, and of gradients
    }
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("arch", "fields", "tp", "what"),
    [
        ("llama", {"num_key_value_heads": 2}, 1, "a divisor of 2, num_key_value_heads, got 4"),
        ("llama", {}, 2, "a divisor of 2, num_attention_heads / parallel.tp, got 4"),
        ("gdn2.llama", {}, 1, "a divisor of 2, num_heads of gdn, got 4"),
        ("gdn2", {"linear_num_heads": 4}, 2, "a divisor of 2, num_heads of gdn / parallel.tp, got 4"),
        ("llama", {"mlp": "moe"}, 1, "1 with experts, whose places and balance depend on all tokens of a window"),
        ("llama+canon=A:k30", {}, 1, "at most 2, as convolutions read 29 tokens of the part before, got 4"),
        ("own", {}, 1, "1 with own: only our mixers exchange tokens for heads, got 4"),
        ("hf:llama", {}, 1, "1 with hf:llama: only our decoder supports context parallelism, got 4"),
    ],
)
def test_a_model_that_cannot_share_windows(monkeypatch, arch, fields, tp, what):
    monkeypatch.setitem(MIXERS, "own", type("Own", (Retention,), {"__module__": "mine", "name": "own"}))
    if arch == "own":
        arch, fields = "retention", {"mixers": ["own"]}
    with torch.device("meta"):
        model = build(arch, replace(SMALL, fields=fields))
    with pytest.raises(ValueError) as refused:
        model.check_context_parallel(4, tp)
    assert str(refused.value).startswith(f"parallel.cp: expected {what}")

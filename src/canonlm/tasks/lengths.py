"""The base of tasks whose samples have a length n."""

from typing import Any

import numpy as np

from canonlm.tasks.base import Slice, Task, Vocab
from canonlm.tasks.describe import Scale


class LengthTask(Task):
    """Its settings are a `LengthSpec`; its answers are sliced by n."""

    scales = {"n": Scale("length", lambda value: f"length {value}", trained="N")}

    def __init__(self, spec: Any, vocab: Vocab) -> None:
        self.spec, self.vocab = spec, vocab
        self.test_lengths: list[int] = spec.lengths()
        self.longest = max(spec.N, *self.test_lengths)

    def slices(self) -> list[Slice]:
        return [{"n": n} for n in self.test_lengths]

    def lengths_of(self, slice: Slice) -> list[int]:
        """The n of the test samples in a slice."""
        return [int(slice["n"])] if "n" in slice else self.test_lengths

    def lengths(self, test: bool) -> np.ndarray:
        """The values from which n is drawn."""
        N = self.spec.N
        return np.array(self.test_lengths if test else [N] if self.spec.one_length else range(1, N + 1))

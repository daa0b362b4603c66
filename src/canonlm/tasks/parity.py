"""Parity: is the number of ones odd? Measures state tracking over the number of bits n.

    bos  x_1 … x_n  ans  even | odd

One bit of state is enough, but the answer depends on every bit of the input: a part of the input tells nothing.
"""

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, one_of
from canonlm.tasks.spec import LengthSpec

BOS, FIRST_BIT, ANS, EVEN = 0, 1, 3, 4


@register("parity")
class Parity(LengthTask):
    """The parity of n random bits. Loss on the answer."""

    class Spec(LengthSpec):
        """n is the number of bits."""

    difficulties = {f"parity-{N}": {"N": N} for N in (32, 128)}
    about = "The model reads a row of zeros and ones and must say whether the number of ones is even or odd."
    scales = {"n": Scale("number of bits", counted("bit"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, Vocab(["bos", "0", "1", "ans", "even", "odd"], ["bos", "ans"]))
        self.max_len = self.longest + 3

    def chance(self, slice: Slice) -> float:
        """Exactly half of all rows of n bits have an odd number of ones, even if all bits but one are known."""
        return 0.5

    def explain(self, sample: Sample, query: Query) -> str:
        return counted("one")(str(sample.meta["ones"]))

    def sampler(self, test: bool) -> Sampler:
        return _loop, (self.lengths(test),)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = len(tokens) - 3
        if not 1 <= n <= self.longest:
            shape = f"bos, 1 to {self.longest} bits, ans and the answer"
            raise Malformed(len(tokens), f"expected {shape}, got {len(tokens)} tokens")
        ones = sum(token == FIRST_BIT + 1 for token in tokens[1 : n + 1])
        bits, right = {FIRST_BIT, FIRST_BIT + 1}, [{BOS}, *[{FIRST_BIT, FIRST_BIT + 1}] * n, {ANS}, {EVEN + ones % 2}]
        for at, (token, allowed) in enumerate(zip(tokens, right, strict=True)):
            if token not in allowed:
                raise self.vocab.unlike(tokens, at, "a bit" if allowed == bits else self.vocab.text(allowed))
        return {"n": n, "ones": ones}, (Query(n + 2, n + 3, {"n": n}, n + 1),)


def _draw(state, gamma, tables, room, tokens, targets):
    (lengths,) = tables
    state, n = one_of(state, gamma, lengths)
    tokens[0] = BOS
    bits = ones = 0
    for i in range(n):
        if i % 32 == 0:
            state, bits = below(state, gamma, 1 << 32)
        tokens[i + 1] = FIRST_BIT + (bits & 1)
        ones += bits & 1
        bits >>= 1
    tokens[n + 1] = ANS
    tokens[n + 2] = EVEN + ones % 2
    targets[: n + 2] = IGNORE
    targets[n + 2] = tokens[n + 2]
    return n + 3


_loop = compile_loop(_draw)

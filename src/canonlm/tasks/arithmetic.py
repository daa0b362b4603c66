"""Arithmetic: the value of a formula modulo m. Measures state tracking, with brackets on a stack, over its n tokens.

    bos  2 * 3 + 4 - 1  =  4                brackets=false: * binds before + and -
    bos  ( ( 2 - - 3 ) * 4 )  =  0          brackets=true: every operation has brackets

The two tasks "modular arithmetic" of Delétang et al. (Neural networks and the Chomsky hierarchy, arXiv 2207.02098),
also used for xLSTM (2405.04517) and Mamba-3 (2603.15569). A formula of n tokens with brackets is `( left op right )`,
the length of `left` uniform on 1..n-4; those of 1 to 4 tokens are d, - d, ( d ) and ( - d ). Digits and operators are
independent and equally likely.
"""

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.formulas import (
    BOS,
    EQUALS,
    OPERATORS,
    PLUS,
    ZERO,
    bracketed_value,
    draw_bracketed,
    plain_value,
    value_distribution,
)
from canonlm.tasks.lengths import LengthTask
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import one_of, two_below
from canonlm.tasks.spec import LengthSpec, Sizes

MAX_LENGTH = 2**12


@register("arithmetic")
class Arithmetic(LengthTask):
    """The value of a formula of n tokens. Loss on the answer."""

    class Spec(LengthSpec):
        modulus: int = Field(5, ge=2, le=20)
        ops: str = OPERATORS
        brackets: bool = False
        N: int = Field(40, ge=3, le=MAX_LENGTH)  # training: n uniform on 3..N; without brackets, on the odd ones
        test_lengths: Sizes = None  # test: n uniform on these; None: 5, 9, 17, … and the largest of training

        @model_validator(mode="after")
        def _sensible(self) -> "Arithmetic.Spec":
            if not self.ops or not len(self.ops) == len({*self.ops} & {*OPERATORS}):
                raise self.refuse("ops", "some of + - *, each at most once", self.ops)
            return self

        def possible(self, longest: int) -> range:
            return range(3, longest + 1, 1 if self.brackets else 2)

        def lengths(self) -> list[int]:
            longest = self.possible(self.N)[-1]
            default = {longest, *(1 + (1 << i) for i in range(2, 13) if 1 + (1 << i) < longest)}
            return self.sizes("test_lengths", longest, self.possible(MAX_LENGTH), default)

    difficulties = {"arithmetic-40": {}, "arithmetic-40-brackets": {"brackets": True}}
    about = "The model reads a formula over the numbers modulo m and must give its value at once."
    scales = {"n": Scale("length of the formula", counted("token"), trained="N")}

    def __init__(self, spec: Spec) -> None:
        names = ["bos", "=", "(", ")", *OPERATORS, *map(str, range(spec.modulus))]
        super().__init__(spec, Vocab(names, ["bos", "="]))
        self.max_len = self.longest + 3
        numbers = np.arange(spec.modulus)
        of_two = [op.outer(numbers, numbers) for op in (np.add, np.subtract, np.multiply)]
        self.results = np.stack(of_two).astype(np.int32) % spec.modulus  # [operator, left, right]
        self.ops = np.array([OPERATORS.index(op) for op in spec.ops])

    def chance(self, slice: Slice) -> float:
        """The likeliest value of a formula of n tokens."""
        return float(self.value_distribution(int(slice["n"])).max())

    def value_distribution(self, n: int) -> np.ndarray:
        """float64 [modulus]: the probability of each value of a formula of n tokens."""
        return value_distribution(n, self.spec.brackets, self.ops, self.results)

    def explain(self, sample: Sample, query: Query) -> str:
        return f"the value of the formula is {self.vocab.name(sample.tokens[query.start])} modulo {self.spec.modulus}"

    def sampler(self, test: bool) -> Sampler:
        lengths = self.test_lengths if test else self.spec.possible(self.spec.N)
        return _loop, (np.array(lengths), self.spec.brackets, self.ops, self.results)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        n = len(tokens) - 3
        if not 1 <= n <= self.longest:
            shape = f"bos, 1 to {self.longest} tokens of a formula, = and its value"
            raise Malformed(len(tokens), f"expected {shape}, got {len(tokens)} tokens")
        self.vocab.after(tokens, 0, BOS)
        read = bracketed_value if self.spec.brackets else plain_value
        value = read(self.vocab, tokens, n, self.ops, self.results)
        self.vocab.after(tokens, n + 1, EQUALS)
        self.vocab.after(tokens, n + 2, ZERO + value)
        return {"n": n}, (Query(n + 2, n + 3, {"n": n}, n + 1),)


def _make_room(tables):
    """A stack of what is still to be written, and one of values."""
    lengths, _, _, _ = tables
    longest = lengths.max() + 8
    return np.empty(longest, np.int32), np.empty(longest, np.int32)


def _draw(state, gamma, tables, room, tokens, targets):
    lengths, brackets, ops, results = tables
    m = results.shape[1]
    state, n = one_of(state, gamma, lengths)
    value = 0
    if brackets:
        state, value = draw_bracketed(state, gamma, n, ops, results, room, tokens)
    else:
        done = op = 0
        for at in range(1, n + 1, 2):
            state, digit, which = two_below(state, gamma, m, len(ops))
            tokens[at] = ZERO + digit
            if op == 2:
                value = results[2, value, digit]
            else:
                done, value = results[0, done, value], results[op, 0, digit]
            op = ops[which]
            tokens[at + 1] = PLUS + op
        value = results[0, done, value]
    tokens[0], tokens[n + 1], tokens[n + 2] = BOS, EQUALS, ZERO + value
    targets[: n + 2] = IGNORE
    targets[n + 2] = ZERO + value
    return n + 3


_loop = compile_loop(_draw, _make_room)

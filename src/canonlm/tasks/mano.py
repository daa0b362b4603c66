"""Mano: modular arithmetic in prefix form, without intermediate steps. Measures manipulation over l, the operators.

    bos  len_l  expression  ans_l  result          e.g.  bos len2 - * 3 5 20 ans2 18      (3 * 5 - 20 = -5 = 18 mod 23)

The released generator writes bos, len_l, ans_l and every operator as one of two synonyms, chosen by fair coins
(`synonyms`; here the second one has a prime: bos', +'). The paper does not mention them; `synonyms=False` follows it.
"""

import math

import numpy as np
from pydantic import Field, model_validator

from canonlm.core.numba_cache import njit
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import two_below
from canonlm.tasks.spec import TaskSpec

SYMBOLS = {"a": "+", "s": "-", "m": "*", "d": "/"}  # letter -> token; an operator's number is its position here
SHARE_DEFINED = 1e-3  # with division, at least this share of the drawn expressions must have a value


@register("mano")
class Mano(Task):
    """The value of an expression of l operators. Paper: loss on all tokens; windows of 1024."""

    class Spec(TaskSpec):
        L: int = Field(10, ge=1, le=499)  # training: l uniform on 1..L (from 500 on, the original ids would collide)
        test_lengths: list[int] | None = None  # test: l uniform on these; None: l = L
        ops: str = "asm"  # letters of add, subtract, multiply, divide
        modulus: int = Field(23, ge=2, le=1024)
        synonyms: bool = True  # two tokens for each marker and operator, by fair coins (the release)

        @model_validator(mode="after")
        def _sensible(self) -> "Mano.Spec":
            if not self.ops or set(self.ops) - set(SYMBOLS) or len(set(self.ops)) < len(self.ops):
                raise self.refuse("ops", "letters out of a, s, m, d, each at most once", self.ops)
            lengths = self.test_lengths
            if lengths is not None and not 0 < len(lengths) == len({*lengths} & {*range(1, self.L + 1)}):
                raise self.refuse("test_lengths", f"different integers from 1 to L ({self.L})", lengths)
            if "d" in self.ops and (share := _defined_share(self)) < SHARE_DEFINED:
                what = f"operators whose expressions have a value often enough (with modulus {self.modulus}, "
                raise self.refuse("ops", what + f"for some length up to L = {self.L}, only {share:.1e} do)", self.ops)
            return self

    difficulties = {f"mano-{L}": {"L": L} for L in (10, 13, 16)}
    loss_on = "all"
    marker_is_target = True

    about = (
        "The model reads a nested formula over small numbers and must give its value at once, without writing down "
        "intermediate results."
    )
    scales = {"l": Scale("length of the formula", counted("operation"))}

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        kinds = [list(SYMBOLS).index(letter) for letter in sorted(spec.ops, key=list(SYMBOLS).index)]
        lengths = range(1, spec.L + 1)
        # Every block below has `forms` tokens per entry: the plain one and, with synonyms, the primed one.
        self.forms = forms = 2 if spec.synonyms else 1
        self.first_op = forms
        self.first_len = self.first_op + forms * len(kinds)
        self.first_ans = self.first_len + forms * spec.L
        self.first_value = self.first_ans + forms * spec.L
        plain = ["bos", *(list(SYMBOLS.values())[kind] for kind in kinds), *(f"len{length}" for length in lengths)]
        plain += [f"ans{length}" for length in lengths]
        words = [word + prime for word in plain for prime in ("", "'")[:forms]]
        values = [str(x) for x in range(spec.modulus)]
        self.vocab = Vocab(words + values, [word for word in words if word[0] in "bla"])
        originals = [(9999, 9998), *((kind + 1, kind + 5) for kind in kinds)]
        originals += [(10 * length + u, 10 * length + u + 1) for u in (0, 4) for length in lengths]
        self.original_ids = np.array(
            [x for pair in originals for x in pair[:forms]] + [5000 + x for x in range(spec.modulus)]
        )
        self.max_len = 2 * spec.L + 5
        self._results = _results(spec.ops, spec.modulus)
        self._lengths = {False: np.arange(1, spec.L + 1), True: np.array(spec.test_lengths or [spec.L])}

    def slices(self) -> list[Slice]:
        return [{"l": length} for length in sorted(self._lengths[True].tolist())]

    def chance(self, slice: Slice) -> float:
        """The guess is always the likeliest answer."""
        return float(self.answer_distribution(int(slice["l"])).max())

    def explain(self, sample: Sample, query: Query) -> str:
        return f"{self._infix(sample)} = {sample.meta['value']} modulo {self.spec.modulus}"

    def answer_distribution(self, length: int) -> np.ndarray:
        """The exact distribution of the result of an expression with `length` operators, float64 [modulus]."""
        mass = _value_mass(self._results, length)[length]
        return mass / mass.sum()

    def sampler(self, test: bool) -> Sampler:
        layout = (self.forms, self.first_op, self.first_len, self.first_ans, self.first_value)
        return _loop, (self._lengths[test], self._results, *layout)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        self._expect(tokens, 0, 0, self.forms, "bos")
        self._expect(tokens, 1, self.first_len, self.first_ans, f"len1 … len{self.spec.L}")
        length = (tokens[1] - self.first_len) // self.forms + 1
        stop = 2 * length + 3  # the expression is tokens[2:stop]
        open_parts = 1
        for at in range(2, stop):
            if open_parts == 0:
                raise Malformed(at, f"the expression ends too early for {length} operators")
            self._expect(tokens, at, self.first_op, self.first_len, "", self.first_value)
            open_parts += 1 if tokens[at] < self.first_len else -1
        if open_parts:
            raise Malformed(stop, f"the expression has more than {length} operators")
        marker = self.first_ans + self.forms * (length - 1)
        self._expect(tokens, stop, marker, marker + self.forms, f"ans{length}")
        self._expect(tokens, stop + 1, self.first_value, len(self.vocab), "a value")
        if len(tokens) > stop + 2:
            raise Malformed(stop + 2, "expected the end")
        value = self._value(tokens, 2, stop)
        if value != tokens[stop + 1] - self.first_value:
            raise self.vocab.unlike(tokens, stop + 1, f"the value {value}")
        expression = self.vocab.text(tokens[2:stop])
        return {"l": length, "expression": expression, "value": value}, (Query(stop + 1, stop + 2, {"l": length}, 1),)

    def _expect(self, tokens: list[int], at: int, low: int, high: int, what: str, also_from: int | None = None) -> None:
        if at >= len(tokens):
            raise self.vocab.unlike(tokens, at, what or "the rest of the expression")
        if not (low <= tokens[at] < high or (also_from is not None and also_from <= tokens[at] < len(self.vocab))):
            raise self.vocab.unlike(tokens, at, what or "an operator or a value")

    def _infix(self, sample: Sample) -> str:
        stack: list[str] = []  # right to left, as in _value
        for name in reversed(sample.meta["expression"].split()):
            sign = name.rstrip("'")
            stack.append(f"({stack.pop()} {sign} {stack.pop()})" if sign in SYMBOLS.values() else name)
        return stack.pop().removeprefix("(").removesuffix(")")

    def _value(self, tokens: list[int], start: int, stop: int) -> int:
        """Evaluates right to left, so both arguments of an operator are on the stack when it is reached."""
        stack: list[int] = []
        for at in range(stop - 1, start - 1, -1):
            if tokens[at] >= self.first_value:
                stack.append(tokens[at] - self.first_value)
                continue
            left, right = stack.pop(), stack.pop()
            result = int(self._results[(tokens[at] - self.first_op) // self.forms, left, right])
            if result < 0:
                raise Malformed(at, f"division by {right}, which has no inverse modulo {self.spec.modulus}")
            stack.append(result)
        return stack.pop()


def _results(ops: str, modulus: int) -> np.ndarray:
    """The value of every operation, int16 [operators in the order of SYMBOLS, left, right]; -1: a non-unit divisor."""
    left, right = np.ogrid[:modulus, :modulus]
    inverse = np.array([pow(x, -1, modulus) if math.gcd(x, modulus) == 1 else -1 for x in range(modulus)])
    quotient = np.where(inverse[right] < 0, -1, left * inverse[right] % modulus)
    tables = {"a": (left + right) % modulus, "s": (left - right) % modulus, "m": left * right % modulus, "d": quotient}
    return np.stack([tables[letter] for letter in SYMBOLS if letter in ops]).astype(np.int16)


def _value_mass(results: np.ndarray, longest: int) -> np.ndarray:
    """mass[l, v] = P(a drawn expression of l operators has a value, and it is v); without division a row sums to 1."""
    operators, M, _ = results.shape
    mass = np.zeros((longest + 1, M))
    mass[0] = 1 / M
    for length in range(1, longest + 1):
        # The left part has 0 … l - 1 operators, each equally likely, and the right part the rest.
        pairs = mass[:length].T @ mass[:length][::-1] / length
        for result in results:
            mass[length] += np.bincount(result[result >= 0], weights=pairs[result >= 0], minlength=M) / operators
    return mass


def _defined_share(spec: Mano.Spec) -> float:
    return float(_value_mass(_results(spec.ops, spec.modulus), spec.L).sum(1).min())


def _make_room(tables):
    return np.zeros(tables[0].max() + 4, np.int64)  # of the operator counts


def _draw(state, gamma, tables, stack, tokens, targets):
    op_counts, results, forms, first_op, first_len, first_ans, first_value = tables
    state, which, coins = two_below(state, gamma, len(op_counts), forms * forms * forms)
    length = op_counts[which]
    tokens[0] = coins % forms
    tokens[1] = first_len + forms * (length - 1) + coins // forms % forms
    stop = 2 * length + 3
    value = -1
    while value < 0:  # drawn again if a divisor has no inverse
        state = _expression(state, gamma, length, forms, first_op, first_value, results, stack, tokens)
        value = _value(tokens, stop, forms, first_op, first_value, results, stack)
    tokens[stop] = first_ans + forms * (length - 1) + coins // (forms * forms)
    tokens[stop + 1] = first_value + value
    targets[:stop] = IGNORE
    targets[stop] = tokens[stop]
    targets[stop + 1] = tokens[stop + 1]
    return stop + 2


# Whether a token is a value or an operator is a coin toss that no branch predictor can learn. So the next two functions
# select between numbers instead of branching, which is a third faster.


@njit(cache=True)
def _expression(state, gamma, length, forms, first_op, first_value, results, stack, tokens):
    """tokens[2 : 2l+3] = a random expression; the stack holds the operator counts of the parts still to be written."""
    op_tokens, modulus = results.shape[0] * forms, results.shape[1]
    stack[0] = length
    depth = 0
    for at in range(2, 2 * length + 3):
        inside = stack[depth]
        is_op = inside > 0
        state, drawn, left = two_below(state, gamma, op_tokens if is_op else modulus, inside if is_op else 1)
        tokens[at] = drawn + (first_op if is_op else first_value)
        stack[depth] = inside - 1 - left
        stack[depth + 1] = left
        depth += 1 if is_op else -1
    return state


@njit(cache=True)
def _value(tokens, stop, forms, first_op, first_value, results, stack):
    """The value of tokens[2:stop], read right to left; -1 where a divisor has no inverse."""
    failed = 0
    top = 1  # stack[0] and stack[1] are read, but not used, before there are two values
    stack[0] = 0
    stack[1] = 0
    for at in range(stop - 1, 1, -1):
        token = tokens[at]
        is_op = token < first_value
        result = np.int64(results[(token - first_op) // forms if is_op else 0, stack[top], stack[top - 1]])
        failed += int(is_op and result < 0)
        top += -1 if is_op else 1
        stack[top] = result if is_op else token - first_value
    return -1 if failed else stack[2]


_loop = compile_loop(_draw, _make_room)

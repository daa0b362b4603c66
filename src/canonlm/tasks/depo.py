"""Depo: who comes k steps after me on the cycle? Measures reasoning depth over k.

    bos  s_1 t_1  s_2 t_2 … s_n t_n   qk a ans b   qk' a' ans b'  …

n distinct names form one directed cycle; its n edges are written once, in random order, source before target. Each of
min(n, M) queries asks for the name b that lies k steps after a. A name is one or more tokens: `w7 w3.` has two, and the
dot marks a name's last token, so names are never separated. Law: facts of the released generator and of the paper
(arXiv 2512.17351, App. A).
"""

import numpy as np
from numba import njit
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Slice, Task, Vocab, register
from canonlm.tasks.random import by_law, shuffle, stream, two_below
from canonlm.tasks.spec import TaskSpec
from canonlm.tasks.windows import IGNORE, Windows, place

BOS, ANS, FIRST_Q = 0, 1, 2
MAX_CELLS = 2**22  # bounds the table of names (16 MiB)
_U1 = np.uint64(1)


def cycle_length_law(N: int) -> np.ndarray:
    """P(n), n = 3 … N, in training: proportional to 1 / (n + sqrt(N))."""
    weights = 1.0 / (np.arange(3, N + 1) + np.sqrt(N))
    return weights / weights.sum()


def test_hops(K: int) -> list[int]:
    """The list that k is drawn from in test samples. For K = 32 the release has 32 in it twice; so do we."""
    hops = [1 << i for i in range(K.bit_length())]
    hops += [24] if K == 32 else []
    return hops if hops[-1] == K else [*hops, K]


test_hops.__test__ = False  # type: ignore[attr-defined]  # pytest: a law, not a test


@register("depo")
class Depo(Task):
    """k-step successor on a directed cycle. Paper: loss on the `ans` marker and the answer; windows of 2048."""

    class Spec(TaskSpec):  # bounds on K and name_vocab: where the original ids would collide
        N: int = Field(225, ge=3, le=100_000)  # cycle length: test n = N; training n in 3..N, small n likelier
        K: int = Field(8, ge=1, le=499)  # training: k uniform on 1..K; test: powers of two up to K, and K
        M: int = Field(10, ge=1, le=100_000)  # at most so many queries
        name_vocab: int = Field(50, ge=1, le=4499)  # that many non-final and that many final name tokens
        min_name_len: int = Field(1, ge=1, le=64)
        max_name_len: int = Field(2, ge=1, le=64)

        @model_validator(mode="after")
        def _enough_names(self) -> "Depo.Spec":
            m, low, high = self.name_vocab, self.min_name_len, self.max_name_len
            if high < low:
                raise self.refuse("max_name_len", f"an integer >= min_name_len ({low})", high)
            if (high - low + 1) * m**high > MAX_CELLS:
                raise self.refuse("name_vocab", f"fewer names (lengths x name_vocab^max_name_len <= {MAX_CELLS})", m)
            if (available := sum(m**length for length in range(low, high + 1))) < self.N:
                raise self.refuse("N", f"at most {available}, the number of different names", self.N)
            return self

    difficulties = {f"depo1-{N}": {"N": N, "K": 8} for N in (225, 300, 375)} | {
        f"depo2-{N}": {"N": N, "K": 16, "name_vocab": 3, "min_name_len": 5, "max_name_len": 7} for N in (75, 100, 125)
    }
    loss_on = "answer"

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        N, K, m = spec.N, spec.K, spec.name_vocab
        self.first_name = FIRST_Q + K
        markers = ["bos", "ans", *(f"q{k}" for k in range(1, K + 1))]
        self.vocab = Vocab(
            [*markers, *(f"w{t}" for t in range(1, m + 1)), *(f"w{t}." for t in range(1, m + 1))], markers
        )
        self.original_ids = np.array([9999, 9500, *range(9001, 9001 + K), *range(1, 2 * m + 1)])
        self.max_len = 1 + 2 * N * spec.max_name_len + min(N, spec.M) * (2 + 2 * spec.max_name_len)
        self._hops = {False: np.arange(1, K + 1), True: np.array(test_hops(K))}
        self._cumulative = np.cumsum(cycle_length_law(N))
        self._names = _name_tables(m, spec.min_name_len, spec.max_name_len, self.first_name)

    def slices(self) -> list[Slice]:
        return [{"k": k} for k in sorted({*test_hops(self.spec.K)})]

    def chance(self, slice: Slice) -> float:
        """One of the n = N names of the sample, at random."""
        return 1 / self.spec.N

    def _fill(self, seed: int, split: int, start: int, first: int, loss_on_all: bool, out: Windows) -> None:
        test = split == 3
        lengths = (self.spec.N if test else 0, self._cumulative)
        _fill(
            seed,
            split,
            start,
            first,
            loss_on_all,
            *lengths,
            self._hops[test],
            self.spec.M,
            *self._names,
            self.max_len,
            *out,
        )

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        at = self._marker(tokens, 0, BOS)
        successor: dict[tuple[int, ...], tuple[int, ...]] = {}
        edges = []
        while at < len(tokens) and not FIRST_Q <= tokens[at] < self.first_name:
            (source, middle), begin = self._name(tokens, at), at
            target, at = self._name(tokens, middle)
            if source in successor:
                raise Malformed(begin, f"a second edge from '{self.vocab.text(source)}'")
            successor[source] = target
            edges.append((source, target))
        cycle = self._cycle(successor, edges[0][0] if edges else (), at)
        place_of = {name: i for i, name in enumerate(cycle)}
        queries = []
        while at < len(tokens):
            if not FIRST_Q <= tokens[at] < self.first_name:
                raise Malformed(at, f"expected q1 … q{self.spec.K}, got {self.vocab.name(tokens[at])}")
            k, asked = tokens[at] - FIRST_Q + 1, at
            name, at = self._name(tokens, at + 1)
            if name not in place_of:
                raise Malformed(asked + 1, f"'{self.vocab.text(name)}' is not on the cycle")
            start = self._marker(tokens, at, ANS)
            answer, at = self._name(tokens, start)
            if answer != (right := cycle[(place_of[name] + k) % len(cycle)]):
                raise Malformed(
                    start, f"expected the answer '{self.vocab.text(right)}', got '{self.vocab.text(answer)}'"
                )
            queries.append(Query(start, at, {"k": k}, asked))
        if not queries:
            raise Malformed(at, "expected a query, got the end")
        return {"n": len(cycle), "cycle": tuple(map(self.vocab.text, cycle))}, tuple(queries)

    def _marker(self, tokens: list[int], at: int, marker: int) -> int:
        if at >= len(tokens) or tokens[at] != marker:
            got = self.vocab.name(tokens[at]) if at < len(tokens) else "the end"
            raise Malformed(at, f"expected {self.vocab.names[marker]}, got {got}")
        return at + 1

    def _name(self, tokens: list[int], at: int) -> tuple[tuple[int, ...], int]:
        """The name that starts at `at`, and where it ends."""
        first_final = self.first_name + self.spec.name_vocab
        stop = at
        while stop < len(tokens) and self.first_name <= tokens[stop] < first_final:
            stop += 1
        if stop >= len(tokens) or not first_final <= tokens[stop] < len(self.vocab):
            got = self.vocab.name(tokens[stop]) if stop < len(tokens) else "the end"
            raise Malformed(stop, f"expected the rest of a name, got {got}")
        length = stop + 1 - at
        if not self.spec.min_name_len <= length <= self.spec.max_name_len:
            lengths = f"{self.spec.min_name_len} to {self.spec.max_name_len}"
            raise Malformed(at, f"expected a name of {lengths} tokens, got {length}")
        return tuple(tokens[at : stop + 1]), stop + 1

    def _cycle(self, successor: dict, first: tuple[int, ...], at: int) -> list[tuple[int, ...]]:
        if not 3 <= len(successor) <= self.spec.N:
            raise Malformed(at, f"expected 3 to {self.spec.N} edges before the first query, got {len(successor)}")
        cycle = [first]
        while (name := successor.get(cycle[-1])) is not None and name != first and len(cycle) <= len(successor):
            cycle.append(name)
        if name != first or len(cycle) != len(successor):
            raise Malformed(at, "the edges before it do not form one cycle")
        return cycle


def _name_tables(m: int, low: int, high: int, first_name: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cells int32 [c], tokens int32 [names, high, made even], lengths int32 [names]).

    A name's length is uniform on low..high, then each token is uniform; so a name of length l has m^(high-l) of the c
    equally likely cells, and one bounded draw picks a name.
    """
    cells, rows, lengths, count = [], [], [], 0
    for length in range(low, high + 1):
        codes = np.arange(m**length)
        digits = codes[:, None] // m ** np.arange(length)[::-1] % m + first_name
        digits[:, -1] += m
        rows.append(np.pad(digits, ((0, 0), (0, high + high % 2 - length))))
        lengths.append(np.full(len(codes), length))
        cells.append(np.repeat(count + codes, m ** (high - length)))
        count += len(codes)
    joined = (np.concatenate(parts).astype(np.int32) for parts in (cells, rows, lengths))
    return tuple(joined)  # type: ignore[return-value]


@njit(cache=True)
def _write(tokens, at, names, lengths, name):
    """Always writes the longest length: the surplus is overwritten next, and no branch depends on the draw.

    Two tokens a step and unsigned indices (numba looks for negative ones otherwise): twice the speed of the whole task.
    """
    row = np.uint64(name)
    for t in range(0, names.shape[1], 2):
        here, column = np.uint64(at + t), np.uint64(t)
        tokens[here] = names[row, column]
        tokens[here + _U1] = names[row, column + _U1]
    return at + lengths[row]


@njit(cache=True, nogil=True)
def _fill(
    seed,
    split,
    start,
    first,
    loss_on_all,
    n_test,
    cumulative,
    hops,
    M,
    cells,
    names,
    lengths,
    max_len,
    ids,
    labels,
    docs,
):
    longest = names.shape[1]
    most = n_test if n_test else len(cumulative) + 2
    tokens, targets = np.empty(max_len + longest, np.int32), np.empty(max_len + longest, np.int32)
    cycle, order = np.empty(most + 2, np.int32), np.empty(most, np.int32)
    seen, stamp = np.zeros(len(lengths), np.int32), 0  # seen[name] == stamp: the name is in this instance already
    for row in range(ids.shape[0]):
        at = 0
        doc = 0
        while at < ids.shape[1]:
            stamp += 1
            state, gamma = stream(seed, split, start + row, first + doc)
            n = n_test
            if n == 0:
                state, i = by_law(state, gamma, cumulative)
                n = i + 3
            length = _instance(
                state, gamma, n, hops, M, cells, names, lengths, cycle, order, seen, stamp, tokens, targets
            )
            at = place(tokens, targets, length, doc, loss_on_all, ids[row], labels[row], docs[row], at)
            doc += 1


@njit(cache=True)
def _instance(state, gamma, n, hops, M, cells, names, lengths, cycle, order, seen, stamp, tokens, targets):
    found = 0
    while found < n:  # duplicates are overwritten by the next draw; a name too many is left over
        state, a, b = two_below(state, gamma, len(cells), len(cells))
        for cell in (a, b):
            name = cells[cell]
            cycle[found] = name
            found += seen[name] != stamp
            seen[name] = stamp
    # Names come in an order that favours the likely (short) ones, so the cycle needs a shuffle of its own.
    state = shuffle(state, gamma, cycle, n, n)
    cycle[n] = cycle[0]
    for i in range(n):
        order[i] = i
    state = shuffle(state, gamma, order, n, n)

    tokens[0] = BOS
    at = 1
    for i in range(n):
        at = _write(tokens, at, names, lengths, cycle[order[i]])
        at = _write(tokens, at, names, lengths, cycle[order[i] + 1])
    for i in range(at):
        targets[i] = IGNORE

    for i in range(min(n, M)):
        state, pick, hop = two_below(state, gamma, n - i, len(hops))
        source = order[i + pick]  # one Fisher-Yates step: starts without replacement
        order[i + pick] = order[i]
        tokens[at] = FIRST_Q + hops[hop] - 1
        answer = _write(tokens, at + 1, names, lengths, cycle[source])
        for t in range(at, answer):
            targets[t] = IGNORE
        tokens[answer] = ANS
        at = _write(tokens, answer + 1, names, lengths, cycle[(source + hops[hop]) % n])
        for t in range(answer, at):
            targets[t] = tokens[t]
    return at

"""Depo: which name is k steps ahead on the cycle? Measures reasoning depth over k.

    bos  s_1 t_1  s_2 t_2 … s_n t_n   qk a ans b   qk' a' ans b'  …

n distinct names form one directed cycle; its n edges are written once, in random order, source before target. Each of
min(n, M) queries asks for the name b that lies k steps after a. A name is one or more tokens: `w7 w3.` has two, and the
dot marks a name's last token, so names need no separators. The distribution follows the released generator and the
paper (arXiv 2512.17351, App. A).
"""

import numpy as np
from pydantic import Field, model_validator

from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import draw_index, one_of, shuffle, two_below
from canonlm.tasks.spec import Sizes, TaskSpec
from canonlm.tasks.tokens import Names, check_names, draw_names, room_for_names, write_name

BOS, ANS, FIRST_Q = 0, 1, 2


def size_distribution(N: int) -> np.ndarray:
    """P(n) for n = 3 … N in training, proportional to 1 / (n + sqrt(N)). Brevo uses it too."""
    weights = 1.0 / (np.arange(3, N + 1) + np.sqrt(N))
    return weights / weights.sum()


def test_hops(K: int) -> list[int]:
    """The list from which test samples draw k. For K = 32 it contains 32 twice, as in the release."""
    hops = [1 << i for i in range(K.bit_length())]
    hops += [24] if K == 32 else []
    return hops if hops[-1] == K else [*hops, K]


test_hops.__test__ = False  # type: ignore[attr-defined]  # not a test for pytest to collect


@register("depo")
class Depo(Task):
    """k-step successor on a directed cycle. Paper: loss on the `ans` marker and the answer; windows of 2048."""

    class Spec(TaskSpec):  # above the bounds on K and name_vocab, the original ids would collide
        N: int = Field(225, ge=3, le=100_000)  # cycle length: training n in 3..N, small n more likely
        test_lengths: Sizes = None  # test: n uniform on these, and answers are sliced by n, too; None: n = N
        K: int = Field(8, ge=1, le=499)  # training: k uniform on 1..K; test: powers of two up to K, and K
        train_k: int | None = Field(None, ge=1)  # training: k = train_k; None: k uniform on 1..K
        M: int = Field(10, ge=1, le=100_000)  # max number of queries
        name_vocab: int = Field(50, ge=1, le=4499)  # number of non-final name tokens, and of final ones
        min_name_len: int = Field(1, ge=1, le=64)
        max_name_len: int = Field(2, ge=1, le=64)

        @model_validator(mode="after")
        def _enough_names(self) -> "Depo.Spec":
            if self.N <= self.K:
                what = f"an integer > K ({self.K}), or test questions would go round the whole ring"
                raise self.refuse("N", what, self.N)
            if self.train_k is not None and self.train_k > self.K:
                raise self.refuse("train_k", f"an integer <= K ({self.K})", self.train_k)
            check_names(self, self.name_vocab, self.min_name_len, self.max_name_len, self.N)
            self.lengths()
            return self

        def lengths(self) -> list[int]:
            names = sum(self.name_vocab**length for length in range(self.min_name_len, self.max_name_len + 1))
            return self.sizes("test_lengths", self.N, range(self.K + 1, min(names, 100_000) + 1), [self.N])

        def longest(self) -> int:
            return max(self.N, *self.lengths())

    difficulties = {f"depo1-{N}": {"N": N, "K": 8} for N in (225, 300, 375)} | {
        f"depo2-{N}": {"N": N, "K": 16, "name_vocab": 3, "min_name_len": 5, "max_name_len": 7} for N in (75, 100, 125)
    }
    difficulties |= {f"{name}-k4": {**spec, "K": 4} for name, spec in difficulties.items()}  # for weaker models
    loss_on = "answer"
    marker_is_target = True

    about = (
        "The model reads the arrows of a ring in shuffled order, then is asked: starting here, where are you after k "
        "steps along the ring? One hop can be looked up; every further hop has to be worked out without writing down "
        "the steps in between."
    )
    scales = {
        "k": Scale("number of hops", counted("hop")),
        "n": Scale("length of the ring", counted("name"), trained="N"),
    }

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        N, K, longest = spec.N, spec.K, spec.longest()
        self.names = Names(spec.name_vocab, spec.min_name_len, spec.max_name_len, FIRST_Q + K)
        markers = ["bos", "ans", *(f"q{k}" for k in range(1, K + 1))]
        self.vocab = Vocab([*markers, *self.names.tokens], markers)
        self.original_ids = np.array([9999, 9500, *range(9001, 9001 + K), *range(1, 2 * spec.name_vocab + 1)])
        self.max_len = 1 + 2 * longest * spec.max_name_len + min(longest, spec.M) * (2 + 2 * spec.max_name_len)
        trained = np.arange(1, K + 1) if spec.train_k is None else np.array([spec.train_k])
        self._hops = {False: trained, True: np.array(test_hops(K))}
        self._sizes = {False: np.empty(0, np.int64), True: np.array(spec.lengths())}
        self._cumulative = np.cumsum(size_distribution(N))

    def slices(self) -> list[Slice]:
        by_hops: list[Slice] = [{"k": k} for k in sorted({*test_hops(self.spec.K)})]
        return [*by_hops, *({"n": n} for n in self.spec.lengths() if self.spec.test_lengths)]

    def chance(self, slice: Slice) -> float:
        """The guess is a random name of the ring other than the one in the question (never the answer, as k < n). A
        ring has as many questions as any other of at least M names."""
        sizes = np.array([slice["n"]] if "n" in slice else self.spec.lengths(), np.float64)
        questions = np.minimum(sizes, self.spec.M)
        return float((questions / (sizes - 1)).sum() / questions.sum())

    def explain(self, sample: Sample, query: Query) -> str:
        cycle, k = sample.meta["cycle"], int(query.slice["k"])
        start_name = self.vocab.text(sample.tokens[query.question_start + 1 : query.start - 1])
        at = cycle.index(start_name)
        path = [cycle[(at + step) % len(cycle)] for step in range(k + 1)]
        path[3:-2] = ["…"] if k > 8 else path[3:-2]
        return f"{' → '.join(path)}: {k} {'step' if k == 1 else 'steps'}"

    def sampler(self, test: bool) -> Sampler:
        return _loop, (self._sizes[test], self._cumulative, self._hops[test], self.spec.M, *self.names.tables)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        at = self.vocab.after(tokens, 0, BOS)
        successor: dict[tuple[int, ...], tuple[int, ...]] = {}
        edges = []
        while at < len(tokens) and not FIRST_Q <= tokens[at] < self.names.first:
            (source, middle), begin = self.names.read(self.vocab, tokens, at), at
            target, at = self.names.read(self.vocab, tokens, middle)
            if source in successor:
                raise Malformed(begin, f"a second edge from '{self.vocab.text(source)}'")
            successor[source] = target
            edges.append((source, target))
        cycle = self._cycle(successor, edges[0][0] if edges else (), at)
        place_of = {name: i for i, name in enumerate(cycle)}
        queries = []
        while at < len(tokens):
            if not FIRST_Q <= tokens[at] < self.names.first:
                raise self.vocab.unlike(tokens, at, f"q1 … q{self.spec.K}")
            k, question_start = tokens[at] - FIRST_Q + 1, at
            name, at = self.names.read(self.vocab, tokens, at + 1)
            if name not in place_of:
                raise Malformed(question_start + 1, f"'{self.vocab.text(name)}' is not on the cycle")
            start = self.vocab.after(tokens, at, ANS)
            answer, at = self.names.read(self.vocab, tokens, start)
            if answer != (right := cycle[(place_of[name] + k) % len(cycle)]):
                raise Malformed(
                    start, f"expected the answer '{self.vocab.text(right)}', got '{self.vocab.text(answer)}'"
                )
            of_length: Slice = {"n": len(cycle)} if self.spec.test_lengths else {}
            queries.append(Query(start, at, {"k": k, **of_length}, question_start))
        if not queries:
            raise Malformed(at, "expected a query, got the end")
        return {"n": len(cycle), "cycle": tuple(map(self.vocab.text, cycle))}, tuple(queries)

    def _cycle(self, successor: dict, first: tuple[int, ...], at: int) -> list[tuple[int, ...]]:
        longest = self.spec.longest()
        if not 3 <= len(successor) <= longest:
            raise Malformed(at, f"expected 3 to {longest} edges before the first query, got {len(successor)}")
        cycle = [first]
        while (name := successor.get(cycle[-1])) is not None and name != first and len(cycle) <= len(successor):
            cycle.append(name)
        if name != first or len(cycle) != len(successor):
            raise Malformed(at, "the edges before it do not form one cycle")
        return cycle


def _make_room(tables):
    sizes, cumulative, _, _, _, _, lengths = tables
    max_size = sizes[-1] if len(sizes) else len(cumulative) + 2
    cycle, order = np.empty(max_size + 2, np.int32), np.empty(max_size, np.int32)
    return cycle, order, *room_for_names(lengths)


def _draw(state, gamma, tables, room, tokens, targets):
    sizes, cumulative, hops, M, cells, names, lengths = tables
    cycle, order, seen, stamp = room
    if len(sizes) == 1:
        n = sizes[0]
    elif len(sizes) > 1:
        state, n = one_of(state, gamma, sizes)
    else:  # in training
        state, i = draw_index(state, gamma, cumulative)
        n = i + 3
    state = draw_names(state, gamma, n, cells, seen, stamp, cycle)
    cycle[n] = cycle[0]
    for i in range(n):
        order[i] = i
    state = shuffle(state, gamma, order, n, n)

    tokens[0] = BOS
    at = 1
    for i in range(n):
        at = write_name(tokens, at, names, lengths, cycle[order[i]])
        at = write_name(tokens, at, names, lengths, cycle[order[i] + 1])
    targets[:at] = IGNORE

    for i in range(min(n, M)):
        state, pick, hop = two_below(state, gamma, n - i, len(hops))
        source = order[i + pick]  # one Fisher-Yates step: draws starts without replacement
        order[i + pick] = order[i]
        tokens[at] = FIRST_Q + hops[hop] - 1
        answer = write_name(tokens, at + 1, names, lengths, cycle[source])
        for t in range(at, answer):
            targets[t] = IGNORE
        tokens[answer] = ANS
        at = write_name(tokens, answer + 1, names, lengths, cycle[(source + hops[hop]) % n])
        for t in range(answer, at):
            targets[t] = tokens[t]
    return at


_loop = compile_loop(_draw, _make_room)

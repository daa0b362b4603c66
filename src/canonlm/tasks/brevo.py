"""Brevo: which nodes must come before this one, and in which order? Measures reasoning breadth over the ancestors.

    bos  p_1 c_1  p_2 c_2 … p_e c_e   query x   ans a_1 … a_m   end

A sample has the edges p → c (parent, child) of a directed acyclic graph in random order, then a question about a node
x. The answer lists x and all its ancestors, every node after its parents (so x comes last); any such order is right. A
node's name is one token (Brevo1) or several (Brevo2: `w3 w1.`, the dot marks a name's last token). The distribution
follows the released generator and the paper (arXiv 2512.17351, App. A).
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from canonlm.core.numba_cache import njit
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Verdict, Vocab, register
from canonlm.tasks.depo import size_distribution
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import IGNORE, compile_loop
from canonlm.tasks.random import below, draw_index, shuffle, stream, two_below
from canonlm.tasks.records import token_id
from canonlm.tasks.spec import TaskSpec
from canonlm.tasks.tokens import Names, PlainNames, check_names, draw_names, room_for_names, write_name

BOS, QUERY, ANS, END, FIRST_NAME = range(5)
MAX_DEGREE = 4  # max parents of a node, and max children
DEEP = 6  # depths from here on share a slice
ORIGINAL_ANS = 9998  # the release ends a sample with the same id


@register("brevo")
class Brevo(Task):
    """The ancestors of a node, in topological order. Paper: loss on `ans`, the answer and `end`."""

    class Spec(TaskSpec):  # above the bounds on N and name_vocab, the original ids would collide
        N: int = Field(70, ge=3, le=9996)  # nodes; test: n = N; training: n in 3..N, small n more likely
        query: Literal["last", "last_quarter"] = "last"  # which node to ask about, as constructed: release, paper
        name_vocab: int | None = Field(
            None, ge=1, le=4998
        )  # number of non-final and of final tokens; None: one per node
        min_name_len: int = Field(1, ge=1, le=64)
        max_name_len: int = Field(1, ge=1, le=64)

        @model_validator(mode="after")
        def _enough_names(self) -> "Brevo.Spec":
            low, high = self.min_name_len, self.max_name_len
            if self.name_vocab is not None:
                check_names(self, self.name_vocab, low, high, self.N)
            elif high < low:
                raise self.refuse("max_name_len", f"an integer >= min_name_len ({low})", high)
            elif (low, high) != (1, 1):
                raise self.refuse("name_vocab", f"an integer, as names have {low} to {high} tokens", self.name_vocab)
            return self

    difficulties = {f"brevo1-{N}": {"N": N} for N in (70, 90, 110)} | {
        f"brevo2-{N}": {"N": N, "name_vocab": 4, "min_name_len": 2, "max_name_len": 4} for N in (30, 40, 50)
    }
    loss_on = "answer"
    marker_is_target = True
    evaluation = "generate"

    about = (
        "The model reads what depends directly on what, and must list everything that one item depends on, in a valid "
        "order."
    )
    scales = {
        "n": Scale("number of items", counted("item")),
        "depth": Scale(
            "depth of the question",
            lambda v: f"depth {v}",
            "Depth: the smallest number of steps from the item asked about to one that depends on nothing.",
        ),
        "nodes": Scale(
            "length of the answer",
            lambda v: f"{v.replace('-', '–')} to list",
            "How many items the right answer lists: the broader the question, the longer its answer.",
        ),
    }

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        N, m, longest = spec.N, spec.name_vocab, spec.max_name_len
        self.names = Names(m, spec.min_name_len, longest, FIRST_NAME) if m else PlainNames(N, FIRST_NAME)
        self.vocab = Vocab(["bos", "query", "ans", "end", *self.names.tokens], ["bos", "query", "ans"])
        self.original_ids = np.array([9999, 9997, ORIGINAL_ANS, ORIGINAL_ANS, *range(1, len(self.names.tokens) + 1)])
        self._max_edges = sum(min(MAX_DEGREE, i) for i in range(1, N))
        self.max_len = 4 + (2 * self._max_edges + 1 + N) * longest
        self._cumulative = np.cumsum(size_distribution(N))

    def slices(self) -> list[Slice]:
        N = self.spec.N
        depths: list[Slice] = [{"depth": depth_slice(depth)} for depth in range(1, min(N - 1, DEEP) + 1)]
        buckets = dict.fromkeys(bucket(nodes) for nodes in range(2, N + 1))
        return [{"n": N}, *depths, *({"nodes": name} for name in buckets)]

    def chance(self, slice: Slice) -> float:
        """Some other node, then the one asked about. It can only be right if the latter has a single ancestor; how
        often that is so comes from simulated graphs (`graph_counts`). It is the list that scores most from six nodes
        on; of fewer, with query="last", all nodes in random order score more: 3/8 of three, where this is 1/8."""
        counts = graph_counts(self.spec.N, self.spec.query)
        depths, nodes = np.indices(counts.shape)
        inside = np.ones(counts.shape, bool)
        if "depth" in slice:
            inside &= depths == int(str(slice["depth"]).rstrip("+"))
        if "nodes" in slice:
            low, high = map(int, str(slice["nodes"]).split("-"))
            inside &= (low <= nodes) & (nodes <= high)
        graphs = counts[inside].sum()
        return float(counts[inside & (nodes == 2)].sum() / max(1, graphs) / (self.spec.N - 1))

    def explain(self, sample: Sample, query: Query) -> str:
        parents, answer = sample.meta["parents"], sample.meta["answer"]
        steps = [f"{name} (after {', '.join(parents[name])})" if parents[name] else name for name in answer]
        steps[3:-2] = ["…"] if len(steps) > 6 else steps[3:-2]
        return f"{sample.meta['query']} and its ancestors, parents first: {', '.join(steps)}"

    def from_original(self, ids: Sequence[int] | np.ndarray) -> Sample:
        """As for every task, but the first 9998 is the marker of the answer, and the second its end."""
        tokens = self._from_original(ids)
        if END in tokens:
            tokens[tokens.index(END)] = ANS
        return self.read(tokens)

    def sampler(self, test: bool) -> Sampler:
        of_quarter = self.spec.query == "last_quarter"
        return _loop, (self.spec.N if test else 0, self._cumulative, of_quarter, self._max_edges, *self.names.tables)

    # -- reading and grading ------------------------------------------------------------------------------------------

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        at = self.vocab.after(tokens, 0, BOS)
        parents: dict[str, tuple[str, ...]] = {}
        while at < len(tokens) and tokens[at] != QUERY:
            begin = at
            parent, at = self._name(tokens, at)
            child, at = self._name(tokens, at)
            if parent in parents.setdefault(child, ()):
                raise Malformed(begin, f"the edge from {parent} to {child} a second time")
            parents[child] += (parent,)
            parents.setdefault(parent, ())
        self._check_graph(parents, at)
        question_start = at
        name, at = self._name(tokens, self.vocab.after(tokens, at, QUERY))
        if not parents.get(name):
            raise Malformed(question_start + 1, f"{name} has no parent")
        start = self.vocab.after(tokens, at, ANS)
        answer, _ = self._written_names(tokens[start:])
        depth = _depth(parents, name)
        facts = {"parents": parents, "query": name, "answer": tuple(answer), "depth": depth}
        if fault := self._fault(facts, tokens[start:]):
            raise Malformed(start, fault)
        if tokens.index(END) < len(tokens) - 1:
            raise Malformed(tokens.index(END) + 1, "expected nothing after the end token")
        where: Slice = {"n": self.spec.N, "depth": depth_slice(depth), "nodes": bucket(len(answer))}
        return facts, (Query(start, len(tokens), where, question_start),)

    def _name(self, tokens: list[int], at: int) -> tuple[str, int]:
        name, at = self.names.read(self.vocab, tokens, at)
        return self.vocab.text(name), at

    def _check_graph(self, parents: dict[str, tuple[str, ...]], at: int) -> None:
        if not 3 <= len(parents) <= self.spec.N:
            raise Malformed(at, f"expected edges between 3 to {self.spec.N} different nodes, got {len(parents)}")
        children = Counter(parent for group in parents.values() for parent in group)
        if crowd := [name for name in parents if max(len(parents[name]), children[name]) > MAX_DEGREE]:
            raise Malformed(at, f"{crowd[0]} has more than {MAX_DEGREE} parents or children")
        try:
            TopologicalSorter(parents).prepare()
        except CycleError as error:
            raise Malformed(at, f"the edges before it form a cycle: {' → '.join(error.args[1])}") from None

    def _judge(self, sample: Sample, query: Query, answer: list[Any] | None) -> Verdict:
        fault = self._fault(sample.meta, answer or [])
        return Verdict(not fault, query.slice, fault)

    def _written_names(self, tokens: list[Any]) -> tuple[list[str], str]:
        """The names up to the end token, and what is wrong with the ending ("" if nothing is)."""
        names, unfinished = [], []
        for token in tokens:
            if (number := token_id(token)) == END:
                break
            unfinished.append(token)
            if self.names.first_final <= number < self.names.stop:
                names.append(self.vocab.text(unfinished))
                unfinished = []
        else:
            return names, "no end token" if tokens else "empty answer"
        if unfinished:
            return names, f"unfinished name {self.vocab.text(unfinished)}"
        return names, "" if names else "empty answer"

    def _fault(self, facts: dict[str, Any], tokens: list[Any]) -> str:
        """The reason why this answer is wrong; "" if it is right."""
        names, fault = self._written_names(tokens)
        parents, query = facts["parents"], facts["query"]
        ancestors = _ancestors(parents, query)
        place_of = {name: i for i, name in reversed([*enumerate(names)])}  # its first position
        for i, name in enumerate(names):
            if name not in ancestors:
                return f"{name} is not an ancestor of {query}"
            if place_of[name] < i:
                return f"repeats {name}"
            if late := [parent for parent in parents[name] if place_of.get(parent, i) > i]:
                return f"{name} comes before its parent {late[0]}"
        missing = [name for name in ancestors if name not in place_of]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return fault or (f"misses {', '.join(missing[:3])}{more}" if missing else "")


def depth_slice(depth: int) -> int | str:
    return depth if depth < DEEP else f"{DEEP}+"


def bucket(nodes: int) -> str:
    """The slice for an answer with this number of nodes: 2-4, 5-8, 9-16, …"""
    high = max(4, 1 << (nodes - 1).bit_length())
    return f"{high // 2 + 1 if high > 4 else 2}-{high}"


def _ancestors(parents: dict[str, tuple[str, ...]], query: str) -> dict[str, int]:
    """The query and its ancestors, each with its distance: the smallest number of edges between them."""
    distance = {query: 0}
    for name in (queue := [query]):
        for parent in parents[name]:
            if parent not in distance:
                distance[parent] = distance[name] + 1
                queue.append(parent)
    return distance


def _depth(parents: dict[str, tuple[str, ...]], query: str) -> int:
    """The distance from the query to the nearest node without parents."""
    return min(edges for name, edges in _ancestors(parents, query).items() if not parents[name])


@cache
def graph_counts(N: int, query: str) -> np.ndarray:
    """The number of simulated test graphs with depth d and an answer of m nodes, out of 2^22 / N graphs.

    int64 [DEEP + 1, N + 1].
    """
    counts = np.zeros((DEEP + 1, N + 1), np.int64)
    _simulate(N, query == "last_quarter", max(1, 2**22 // N), counts)
    return counts


# -- the sampler: nodes are numbered in the order of construction ------------------------------------------------------


@njit(cache=True)
def _graph(state, gamma, n, from_quarter, parents, degree, children, open_nodes, edges):
    """Draw a graph of n nodes and the node of the question. Returns (state, number of edges, that node).

    The first 1 … (n-1)//4 + 1 nodes have no parents. Every other node has 1 … 4, a random set of the nodes before it
    that have fewer than 4 children so far. edges[e] = parent * 2^16 + child. Every node in the last quarter, the last
    ceil(n/4) nodes, has a parent.
    """
    state, more, back = two_below(state, gamma, (n - 1) // 4 + 1, (n + 3) // 4 if from_quarter else 1)
    roots = more + 1
    for i in range(n):
        degree[i] = 0
        children[i] = 0
        open_nodes[i] = i
    count = roots
    written = 0
    for i in range(roots, n):
        max_parents = min(MAX_DEGREE, count)
        state, more_parents = below(state, gamma, max_parents)
        state = shuffle(state, gamma, open_nodes, count, max_parents)
        degree[i] = more_parents + 1
        for t in range(MAX_DEGREE):  # always four: the surplus is overwritten, or not read
            parents[i, t] = open_nodes[t]
            edges[written + t] = open_nodes[t] << 16 | i
        written += degree[i]
        for t in range(more_parents, -1, -1):
            parent = open_nodes[t]
            children[parent] += 1
            if children[parent] == MAX_DEGREE:
                count -= 1
                open_nodes[t] = open_nodes[count]
        open_nodes[count] = i
        count += 1
    return state, written, n - 1 - back


@njit(cache=True)
def _count_children(query, parents, degree, children):
    """Set children[i] to the number of i's children among the query and its ancestors. Returns how many those are."""
    for i in range(query):
        children[i] = 0
    children[query] = 1  # so that the query itself counts
    total = 0
    for i in range(query, -1, -1):
        if children[i]:
            total += 1
            for t in range(degree[i]):
                children[parents[i, t]] += 1
    return total


@njit(cache=True)
def _order(state, gamma, query, total, parents, degree, children, pool, order):
    """Draw the answer from its end: the next node is any one whose children have all been placed. This is the
    release's distribution, and not uniform over the right orders."""
    pool[0] = query
    size = 1
    for at in range(total - 1, -1, -1):
        state, pick = below(state, gamma, size)
        node = pool[pick]
        order[at] = node
        size -= 1
        pool[pick] = pool[size]
        for t in range(degree[node]):
            parent = parents[node, t]
            children[parent] -= 1
            if children[parent] == 0:
                pool[size] = parent
                size += 1
    return state


@njit(cache=True)
def _simulate(N, from_quarter, graphs, counts):
    parents = np.empty((N, MAX_DEGREE), np.int32)
    degree, children = np.empty(N, np.int32), np.empty(N, np.int32)
    open_nodes, edges = np.empty(N + MAX_DEGREE, np.int32), np.empty(MAX_DEGREE * N, np.int32)
    depth = np.empty(N, np.int32)
    for j in range(graphs):
        state, gamma = stream(0, 0, 0, j)  # no split has the number 0
        state, _, query = _graph(state, gamma, N, from_quarter, parents, degree, children, open_nodes, edges)
        for i in range(query + 1):
            depth[i] = N if degree[i] else 0
            for t in range(degree[i]):
                depth[i] = min(depth[i], depth[parents[i, t]] + 1)
        counts[min(depth[query], DEEP), _count_children(query, parents, degree, children)] += 1


def _make_room(tables):
    _, cumulative, _, max_edges, _, _, lengths = tables
    N = len(cumulative) + 2
    parents, degree, children = np.empty((N, MAX_DEGREE), np.int32), np.empty(N, np.int32), np.empty(N, np.int32)
    open_nodes, edges = np.empty(N + MAX_DEGREE, np.int32), np.empty(max_edges + MAX_DEGREE, np.int32)
    drawn, name_of = np.empty(N + 2, np.int32), np.empty(N, np.int32)
    return parents, degree, children, open_nodes, edges, drawn, name_of, *room_for_names(lengths)


def _draw(state, gamma, tables, room, tokens, targets):
    n, cumulative, from_quarter, _, cells, names, lengths = tables
    parents, degree, children, open_nodes, edges, drawn, name_of, seen, stamp = room
    if n == 0:  # in training
        state, i = draw_index(state, gamma, cumulative)
        n = i + 3
    state, written, query = _graph(state, gamma, n, from_quarter, parents, degree, children, open_nodes, edges)
    used = 0
    for i in range(n):  # a node without edges gets no name
        used += degree[i] + children[i] > 0
    state = draw_names(state, gamma, used, cells, seen, stamp, drawn)
    used = 0
    for i in range(n):
        name_of[i] = drawn[used]
        used += degree[i] + children[i] > 0
    state = shuffle(state, gamma, edges, written, written)
    tokens[0] = BOS
    to = 1
    for e in range(written):
        to = write_name(tokens, to, names, lengths, name_of[edges[e] >> 16])
        to = write_name(tokens, to, names, lengths, name_of[edges[e] & 0xFFFF])
    tokens[to] = QUERY
    to = write_name(tokens, to + 1, names, lengths, name_of[query])
    targets[:to] = IGNORE
    answer = to
    tokens[to] = ANS
    to += 1
    total = _count_children(query, parents, degree, children)
    # The edges are in `tokens` by now, so their array can be reused for the order.
    state = _order(state, gamma, query, total, parents, degree, children, open_nodes, edges)
    for i in range(total):
        to = write_name(tokens, to, names, lengths, name_of[edges[i]])
    tokens[to] = END
    to += 1
    for i in range(answer, to):
        targets[i] = tokens[i]
    return to


_loop = compile_loop(_draw, _make_room)

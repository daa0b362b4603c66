"""Pictures of tasks whose samples are one row: arcs lead from what an answer rests on to the answer; below some rows
stands the state after each token. `draw_tasks.py` writes them."""

from collections.abc import Iterator, Mapping
from typing import Any

from svg import EDGE, GREEN, MUTED, ORANGE, Point, Sheet

from canonlm import tasks

Arcs = Iterator[tuple[int, int]]


def parity() -> Sheet:
    task, sample, sheet, centres = _row("parity", {"N": 9, "test_lengths": [9]}, "Is the number of ones odd?")
    ones = 0
    states = {}
    for at, token in enumerate(sample.tokens[1:10].tolist(), 1):
        ones += task.vocab.name(token) == "1"
        states[at] = "odd" if ones % 2 else "even"
    return _with_states(sheet, centres, states, "one bit of state: so far odd or even")


def state() -> Sheet:
    settings = {"group": "S3", "N": 7, "test_lengths": [7]}
    task, sample, sheet, centres = _row(
        "state", settings, "Every token permutes three things. Where are they at the end?"
    )
    product, states = 0, {}
    for at, token in enumerate(sample.tokens[1:8].tolist(), 1):
        product = int(task.group.table[product, token - 2])
        states[at] = f"g{product}"
    return _with_states(sheet, centres, states, "the product so far, an element of the group")


def automaton() -> Sheet:
    task, sample, sheet, centres = _row(
        "automaton", {"states": 4, "N": 9, "test_lengths": [9]}, "Does the automaton accept?", 5
    )
    now, states = 0, {}
    for at, token in enumerate(sample.tokens[1:10].tolist(), 1):
        now = int(task.table[now, token - 2])
        states[at] = str(now)
    accepting = ", ".join(str(i) for i, accepts in enumerate(task.accepting) if accepts)
    return _with_states(
        sheet, centres, states, f"the state of the automaton, which is never shown; it accepts in {accepting}"
    )


def arithmetic() -> Sheet:
    settings = {"N": 9, "test_lengths": [9]}
    task, sample, sheet, centres = _row("arithmetic", settings, "What is the value, modulo 5?")
    value, states = int(task.vocab.name(sample.tokens[1])), {}
    states[1] = str(value)
    for at in range(2, 10, 2):
        sign = 1 if task.vocab.name(sample.tokens[at]) == "+" else -1
        value = (value + sign * int(task.vocab.name(sample.tokens[at + 1]))) % 5
        states[at + 1] = str(value)
    return _with_states(sheet, centres, states, "the value so far")


def flipflop() -> Sheet:
    def writes(task: Any, sample: Any) -> Arcs:
        last = 0
        for at in range(1, len(sample.tokens), 2):
            name = task.vocab.name(sample.tokens[at])
            if name == "r":
                yield last, at + 1
            last = at + 1 if name == "w" else last

    settings = {"N": 8, "test_p_ignore": [0.5]}
    return _linked("flipflop", settings, "Which bit was written last? Ignore what i says.", writes, 3)


def palindrome() -> Sheet:
    def mirrored(task: Any, sample: Any) -> Arcs:
        n = sample.meta["n"]
        return ((n - i, n + 2 + i) for i in range(n))

    return _linked("palindrome", {"N": 7, "test_lengths": [7]}, "Say it backwards.", mirrored)


def selective() -> Sheet:
    def words(task: Any, sample: Any) -> Arcs:
        read = [at for at in range(1, 12) if task.vocab.name(sample.tokens[at]).startswith("x")]
        return zip(read, range(13, 17), strict=True)

    return _linked("selective", {"N": 11, "items": 4}, "Say the words again, without the noise.", words, 1)


def recall() -> Sheet:
    settings = {"pairs": 3, "test_pairs": [3], "noise": 0.25, "keys": 9, "values": 9, "noise_words": 9}

    def bindings(task: Any, sample: Any) -> Arcs:
        for query in sample.queries:
            key = sample.tokens[query.question_start]
            yield next(at for at in range(1, query.start) if sample.tokens[at] == key) + 1, query.start

    return _linked("recall", settings, "Each key came with a value, among noise. Which one?", bindings)


def stack() -> Sheet:
    def pops(task: Any, sample: Any) -> Arcs:
        pushed: dict[str, list[int]] = {}
        for at in range(1, len(sample.tokens), 3):
            kind, name = (task.vocab.name(sample.tokens[i]) for i in (at, at + 1))
            if kind == "push":
                pushed.setdefault(name, []).append(at + 2)
            else:
                yield pushed[name].pop(), at + 2

    settings = {"N": 5, "stacks": 2, "elements": 9}
    return _linked("stack", settings, "What is on top of this stack?", pops, 30)


def induction() -> Sheet:
    def triggers(task: Any, sample: Any) -> Arcs:
        for query in sample.queries:
            trigger = sample.tokens[query.start - 1]
            yield next(at for at in range(1, query.start) if sample.tokens[at] == trigger) + 1, query.start

    return _linked("induction", {"N": 12}, "What followed T1 before?", triggers, 5)


def dictionary() -> Sheet:
    def meanings(task: Any, sample: Any) -> Arcs:
        for query in sample.queries:
            key, row = sample.tokens[query.question_start], sample.tokens[: query.question_start].tolist()
            yield len(row) - row[::-1].index(key), query.start

    settings = {"N": 7, "keys": 4, "values": 9}
    return _linked("dictionary", settings, "A key has the value that it had before. Which one?", meanings)


def _row(
    name: str, settings: Mapping[str, Any], asks: str, index: int = 0, above: float = 20, gap: float = 16
) -> tuple[Any, Any, Sheet, list[Point]]:
    task = tasks.get(name, **settings)
    sample = task.sample("test", 0, index)
    sheet = Sheet(f"{name.capitalize()}: a sample, and what its answer rests on", asks)
    sheet.y += above
    return task, sample, sheet, sheet.tokens(task.show(sample), gap=gap)


def _linked(name: str, settings: Mapping[str, Any], asks: str, arcs: Any, index: int = 0) -> Sheet:
    task, sample, sheet, centres = _row(name, settings, asks, index, above=96, gap=7)
    assert len({y for _, y in centres}) == 1, f"{name}: more tokens than a row has room for"
    for start, stop in arcs(task, sample):
        (x, y), (to, _) = centres[start], centres[stop]
        sheet.arc((x, y - 16), (to, y - 18), GREEN, height=26 + 0.18 * (to - x))
    return sheet


def _with_states(sheet: Sheet, centres: list[Point], states: Mapping[int, str], words: str) -> Sheet:
    for at, name in states.items():
        x, y = centres[at]
        sheet.text((x, y + 34), name, size=13, color=ORANGE, bold=at == max(states))
    sheet.text((EDGE, y + 62), words, size=13, color=MUTED, anchor="start")
    sheet.y = y + 76
    return sheet


DRAWINGS = {
    drawing.__name__: drawing
    for drawing in (
        parity,
        state,
        automaton,
        arithmetic,
        flipflop,
        palindrome,
        selective,
        recall,
        dictionary,
        stack,
        induction,
    )
}

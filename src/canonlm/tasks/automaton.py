"""Automaton: does a random finite automaton accept this word? Measures state tracking over the number of symbols n.

    bos  x_1 … x_n  ans  yes | no         answers=end
    bos  x_1 … x_n  ans                   answers=every: after each x_i, the target is whether it accepts x_1 … x_i

The automaton is one for the whole task, so a model learns it in training: the setting `number` draws another. All
complete deterministic automata with that many states and symbols, half of which accept, are equally likely, if every
state can be reached and no smaller automaton accepts the same words.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from canonlm.tasks.base import Query, Sample, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.packing import rng_of
from canonlm.tasks.random import stream
from canonlm.tasks.words import FIRST, Words, WordsSpec

MAX_STATES = 30  # of many more states, nearly all random automata have some that cannot be reached
AUTOMATA = 0  # in place of a split, in the key of the automaton's random numbers


@register("automaton")
class Automaton(Words):
    """Acceptance of n random symbols by a finite automaton. Loss on the answers."""

    class Spec(WordsSpec):
        states: int = Field(5, ge=2, le=MAX_STATES)
        symbols: int = Field(2, ge=2, le=26)
        steps: Literal["any", "permutations"] = "any"  # permutations: no symbol ever leads two states to one
        number: int = Field(0, ge=0, lt=2**63)  # which random automaton

    difficulties = {
        "automaton-5": {},
        "automaton-12": {"states": 12, "symbols": 3},
        "automaton-5-permutations": {"steps": "permutations"},
    }
    about = "The model reads random symbols and must say whether a finite automaton, always the same, accepts them."
    scales = {"n": Scale("number of symbols", counted("symbol"), trained="N")}
    an_input, the_answer = "a symbol", "yes or no"

    def __init__(self, spec: Spec) -> None:
        table, self.accepting = automaton(spec.states, spec.symbols, spec.steps == "permutations", spec.number)
        names = ["bos", "ans", *(chr(ord("a") + i) for i in range(spec.symbols)), "no", "yes"]
        answers = FIRST + spec.symbols + self.accepting
        super().__init__(spec, Vocab(names, ["bos", "ans"]), [*range(spec.symbols)], table, answers)

    def explain(self, sample: Sample, query: Query) -> str:
        at, n = 0, int(query.slice["n"])
        for token in sample.tokens[1 : n + 1]:
            at = self.table[at, token - FIRST]
        verb = "accepts" if self.accepting[at] else "rejects"
        return f"{counted('symbol')(str(n))} lead to state {at}, which {verb}"


def automaton(states: int, symbols: int, permutations: bool, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(table int [states, symbols], accepting bool [states]) of automaton `number`; it starts in state 0."""
    rng = rng_of(*stream(number, AUTOMATA, states, symbols))
    while True:
        columns = [
            rng.sample(range(states), states) if permutations else rng.choices(range(states), k=states)
            for _ in range(symbols)
        ]
        table, accepting = np.array(columns).T, np.zeros(states, bool)
        accepting[rng.sample(range(states), states // 2)] = True
        if _reached(table) == states == _classes(table, accepting):
            return table, accepting


def _reached(table: np.ndarray) -> int:
    reached = {0}
    while more := {*table[[*reached]].ravel().tolist()} - reached:
        reached |= more
    return len(reached)


def _classes(table: np.ndarray, accepting: np.ndarray) -> int:
    """The number of states of the smallest automaton (Moore 1956): states are told apart by longer and longer words."""
    classes, count = accepting.astype(int), 0
    while (more := len({*classes.tolist()})) > count:
        count = more
        rows = np.column_stack([classes, classes[table]])
        classes = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    return count

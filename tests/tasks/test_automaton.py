"""Automaton: runs of it by hand, all small automata by brute force, and the distribution of words."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks
from canonlm.tasks.automaton import automaton

SETTINGS = st.fixed_dictionaries(
    {
        "states": st.integers(2, 9),
        "symbols": st.integers(2, 4),
        "steps": st.sampled_from(["any", "permutations"]),
        "number": st.integers(0, 2**63 - 1),
        "answers": st.sampled_from(["end", "every"]),
        "N": st.integers(1, 20),
    }
)


@given(SETTINGS, st.sampled_from(["train", "test"]), st.integers(0, 2**40))
def test_every_answer_is_what_the_automaton_says(settings, split, seed):
    task = tasks.get("automaton", **settings)
    sample = task.sample(split, seed, 0)
    word = [ord(name) - ord("a") for name in task.vocab.show(sample).split() if len(name) == 1]
    state, said = 0, []
    for symbol in word:
        state = int(task.table[state][symbol])
        said.append("yes" if task.accepting[state] else "no")
    targets = {int(at): task.vocab.names[sample.labels[at]] for at in np.flatnonzero(sample.labels != -100)}
    every = settings["answers"] == "every"
    assert targets == (dict(enumerate(said, 2)) if every else {len(word) + 2: said[-1]})
    assert {q.slice["n"]: q.start for q in sample.queries} == (
        {n: n + 1 for n in task.test_lengths if n <= len(word)} if every else {len(word): len(word) + 2}
    )
    if len(word) in task.test_lengths or not every:
        verb = {"yes": "accepts", "no": "rejects"}[said[-1]]
        assert task.explain(sample, sample.queries[-1]).endswith(f" lead to state {state}, which {verb}")


def accepted(table, accepting, start, length):
    """For each word of up to `length` symbols, whether it is accepted from this state."""
    out = []
    for word in itertools.chain(*(itertools.product(range(len(table[0])), repeat=n) for n in range(length + 1))):
        state = start
        for symbol in word:
            state = table[state][symbol]
        out.append(bool(accepting[state]))
    return tuple(out)


@pytest.mark.parametrize("permutations", [False, True])
def test_all_minimal_connected_automata_are_equally_likely(permutations, fits):
    columns = [*(itertools.permutations if permutations else lambda r: itertools.product(r, repeat=3))(range(3))]
    every = []
    for columns_of in itertools.product(columns, repeat=2):
        table = [*zip(*columns_of, strict=True)]
        reached = {0}
        for _ in range(3):
            reached |= {to for state in reached for to in table[state]}
        for accepting in np.eye(3, dtype=bool):  # one of three states
            told_apart = {accepted(table, accepting, state, 3) for state in range(3)}
            if len(reached) == len(told_apart) == 3:
                every.append((tuple(table), accepting.argmax()))
    drawn = Counter()
    for number in range(12 * len(every)):
        table, accepting = automaton(3, 2, permutations, number)
        drawn[tuple(map(tuple, table.tolist())), accepting.argmax()] += 1
    assert {*drawn} <= {*every}
    fits([drawn[each] for each in every])


def test_chance_counts_all_words_and_words_are_uniform(documents, fits):
    task = tasks.get("automaton", states=4, N=3, test_lengths=[3, 6])
    for n in (3, 6):
        shares = Counter(accepted(task.table, task.accepting, 0, n)[-(2**n) :])
        assert task.chance({"n": n}) == pytest.approx(max(shares.values()) / 2**n)
    counts = Counter(tuple(doc[1:-2]) for doc in documents(task, "train", 4000))
    words = [word for n in (1, 2, 3) for word in itertools.product((2, 3), repeat=n)]
    fits([counts[word] for word in words], [1 / 3 / 2 ** len(word) for word in words])

"""What guesses score: `chance` in percent of each slice and difficulty, and shortcuts that the pages of tasks name.

    python benchmarks/guesses.py [--samples 40000]

A shortcut sees the sample and does not do the task. It is played on test samples; its score is the mean, in percent,
and the error that of the mean. The last row is the share of MQAR's sizes among the complete samples of windows.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import permutations
from statistics import mean, stdev

from canonlm import tasks

Guess = Callable[[tasks.Task, tasks.Sample, tasks.Query], float]  # the probability that it is right


def last_symbol(task: tasks.Task, samples: int) -> Guess:
    """The answer that follows the last symbol most often, in other samples."""
    after: dict[int, Counter[int]] = defaultdict(Counter)
    for index in range(samples):
        tokens = task.sample("test", 1, index).tokens.tolist()
        after[tokens[-3]][tokens[-1]] += 1
    return lambda _, sample, query: after[sample.tokens[-3]].most_common(1)[0][0] == sample.tokens[query.start]


def bit_before(task: tasks.Task, sample: tasks.Sample, query: tasks.Query) -> float:
    return sample.tokens[query.start - 2] == sample.tokens[query.start]


def not_answered(task: tasks.Task, sample: tasks.Sample, query: tasks.Query) -> float:
    """A name of the ring other than the one in the question and the earlier answers to other names with the same k."""
    tokens, k = sample.tokens.tolist(), query.slice["k"]
    out = {tuple(tokens[query.question_start + 1 : query.start - 1])}
    for other in sample.queries:
        if other.start < query.start and other.slice["k"] == k:
            out.add(tuple(tokens[other.start : other.stop]))
    return 1 / (sample.meta["n"] - len(out))


def all_nodes(task: tasks.Task, sample: tasks.Sample, query: tasks.Query) -> float:
    """All nodes in random order, but the one in the question last."""
    nodes, end = sample.meta["parents"].keys() - {sample.meta["query"]}, [sample.meta["query"], "end"]
    tokens = ([task.vocab.ids[name] for name in (*order, *end)] for order in permutations(nodes))
    return mean(task.grade(sample, [answer])[0].correct for answer in tokens)


def scores(task: tasks.Task, samples: int, guess: Guess) -> dict[str, list[float]]:
    """The probabilities that the guess is right, by slice."""
    right: dict[str, list[float]] = defaultdict(list)
    for index in range(samples):
        sample = task.sample("test", 0, index)
        for query in sample.queries:
            score = float(guess(task, sample, query))
            for where in task.slices():
                if where.items() <= query.slice.items():
                    right[shown(where)].append(score)
    return right


def shown(slice: tasks.Slice) -> str:
    return ", ".join(f"{key}={value}" for key, value in slice.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    samples = parser.parse_args().samples

    print("task\tslice\tchance")
    for name in tasks.names():
        for difficulty in tasks.find(name).difficulties:
            task = tasks.get(name, difficulty=difficulty)
            for where in task.slices():
                print(difficulty, shown(where), f"{100 * task.chance(where):.1f}", sep="\t")

    print("\nshortcut\tslice\tscore\terror\tquestions")
    automaton, ring = tasks.get("automaton", difficulty="automaton-5"), tasks.get("depo", N=8, K=2)
    for title, task, guess in (
        ("automaton-5, the last symbol", automaton, last_symbol(automaton, samples)),
        ("flipflop-64, the bit before", tasks.get("flipflop", difficulty="flipflop-64"), bit_before),
        *((f"brevo of {N} nodes, all of them", tasks.get("brevo", N=N), all_nodes) for N in (3, 4, 5)),
        ("depo of 8 names, none that was an answer", ring, not_answered),
    ):
        by_slice = scores(task, samples, guess)
        for where in map(shown, task.slices()):
            right = by_slice[where]
            score, error = 100 * mean(right), 100 * stdev(right) / len(right) ** 0.5
            print(title, where, f"{score:.1f}", f"{error:.1f}", len(right), sep="\t")

    mqar, sizes = tasks.get("mqar", difficulty="mqar-16"), Counter[int]()
    for window in range(samples):
        sizes.update(placed.sample.meta["n"] for placed in mqar.instances("test", 0, window, 66))
    for pairs, count in sorted(sizes.items()):
        print(f"mqar-16 in windows of 66 tokens\tpairs={pairs}\t{100 * count / sizes.total():.1f}")

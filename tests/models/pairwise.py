"""Choose which models run which test cases: few runs, in which all small combinations of features still occur.

A model and a case each have a set of features, written "name=value". A run is one model in one case. The runs that
`fast_and_slow` chooses cover

- every case with every feature of a model that can run it,
- every two features of a model with every feature of a case,

and each model and each case occurs. So any two features occur in one run, and so do any three of which at least one
belongs to the model and one to the case: "recurrent", "static cache", "left padding" are three such.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain, combinations, product

Features = frozenset[str]
Run = tuple[str, str]  # (model, case)
Target = tuple[Hashable, Hashable]  # (of the model, of the case)


def targets(model: str, features: Features, case: str, case_features: Features) -> Iterator[Target]:
    """What this run covers of all that the chosen runs cover together."""
    pairs = combinations(sorted(features), 2)
    return chain(product(features, [case]), product([*features, *pairs], case_features), [(model, "a case")])


def fast_targets(features: Features, case: str, case_features: Features) -> Iterator[Target]:
    """The same for the fast runs: every case with every mixer and mix of mixers among all Canon sites; every feature
    of a model with every feature of a case."""
    mixers = [feature for feature in features if feature.startswith(("mixer=", "mix="))]
    return chain(product(mixers if "canon=everywhere" in features else [], [case]), product(features, case_features))


def fast_and_slow(
    models: Mapping[str, Features], cases: Mapping[str, Features], can_run: Callable[[str, str], bool]
) -> tuple[list[Run], list[Run]]:
    """The fast runs, which cover all `fast_targets`; the slow ones, which cover what is left of `targets`."""
    runs = [(model, case) for case in cases for model in models if can_run(model, case)]
    fast = cover({(m, c): fast_targets(models[m], c, cases[c]) for m, c in runs})
    return fast, cover({(m, c): targets(m, models[m], c, cases[c]) for m, c in runs}, chosen=fast)


def cover(reached: Mapping[Run, Iterable[Target]], chosen: Iterable[Run] = ()) -> list[Run]:
    """Runs that reach every target which the chosen ones do not: each time the one that reaches most.

    Ties go to the run that is named first, so the choice is always the same.
    """
    numbers: dict[Target, int] = {}
    missing = {run: {numbers.setdefault(target, len(numbers)) for target in each} for run, each in reached.items()}
    covered = set().union(*(missing[run] for run in chosen))
    # What a run adds only shrinks, so the run that comes first by an old count and keeps it is the best.
    queue = [(-len(each), order, run) for order, (run, each) in enumerate(missing.items())]
    heapq.heapify(queue)
    picked = []
    while len(covered) < len(numbers):
        count, order, run = heapq.heappop(queue)
        missing[run] -= covered
        if len(missing[run]) == -count:
            picked.append(run)
            covered |= missing[run]
        elif missing[run]:
            heapq.heappush(queue, (-len(missing[run]), order, run))
    return picked

"""Choose which models run which test cases: few runs that still cover all pairs of features.

A model and a case each have a set of features, written "name=value". A run is one model in one case. The fast runs of
`fast_and_slow` cover every feature of a model with every feature of a case, every model and every case. The slow ones
add every case with every mixer, every mix of mixers and every extent of Canon layers.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain, product

Features = frozenset[str]
Run = tuple[str, str]  # (model, case)
Target = tuple[Hashable, Hashable]  # (of the model, of the case)
MAIN = ("mixer=", "mix=", "canon=")


def fast_targets(model: str, features: Features, case: str, case_features: Features) -> Iterator[Target]:
    """The targets of this run among those that all fast runs must cover."""
    return chain(product(features, case_features), [(model, "a case"), ("a model", case)])


def slow_targets(features: Features, case: str) -> Iterator[Target]:
    """The further targets of this run among those that fast and slow runs must cover together."""
    return product([feature for feature in features if feature.startswith(MAIN)], [case])


def fast_and_slow(
    models: Mapping[str, Features], cases: Mapping[str, Features], can_run: Callable[[str, str], bool]
) -> tuple[list[Run], list[Run]]:
    """The fast runs, which cover all `fast_targets`, and the slow ones, which cover the rest of `slow_targets`."""
    runs = [(model, case) for case in cases for model in models if can_run(model, case)]
    fast = cover({(m, c): fast_targets(m, models[m], c, cases[c]) for m, c in runs})
    return fast, cover({(m, c): slow_targets(models[m], c) for m, c in runs}, chosen=fast)


def cover(reached: Mapping[Run, Iterable[Target]], chosen: Iterable[Run] = ()) -> list[Run]:
    """Runs that reach every target that the chosen ones do not, greedily: the next one reaches the most new targets.

    Ties go to the run that comes first, so the choice is always the same.
    """
    numbers: dict[Target, int] = {}
    missing = {run: {numbers.setdefault(target, len(numbers)) for target in each} for run, each in reached.items()}
    covered = set().union(*(missing[run] for run in chosen))
    # A run's number of new targets only shrinks, so a run that is first by an old count and keeps it is the best.
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

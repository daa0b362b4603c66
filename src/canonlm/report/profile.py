"""A profile in words: who learns faster and is better in the end, task by task, and what limits the comparison."""

import math
from collections.abc import Sequence

from canonlm.experiments.profile_results import HALF, Arm, Profile, TaskProfile, Versus
from canonlm.report.format import count_of, counts_of, listed, percent, points
from canonlm.runs.seed_statistics import Interval
from canonlm.runs.speed import Speed

STATES = {
    "higher": "better at the end on",
    "lower": "worse on",
    "open": "no difference shown on",
    "nothing": "nothing to compare on",
    "undecided": "undecided on",
}
NOT_KNOWN = "not known"


def headlines(profile: Profile) -> list[str]:
    """One sentence for each architecture but the first: on which tasks it learns faster, and is better at the end. Then
    what is uncertain."""
    if len(profile.archs) == 1:
        return [f"{profile.archs[0]} alone: nothing is compared."]
    lines = [_headline(profile, place) for place in range(len(profile.archs) - 1)]
    if profile.quick:
        lines.insert(0, "Not a comparison: --quick shows that everything runs, and about what to expect.")
    if profile.seeds == 1:
        lines.append("One seed proves nothing: another one may reverse each of these results.")
    elif profile.seeds < profile.needed:
        pairs = count_of(len(profile.tasks) * (len(profile.archs) - 1), "comparison")
        lines.append(
            f"Nothing is decided: with {pairs}, a verdict needs {profile.needed} seeds of each architecture, and this "
            f"has {profile.seeds}."
        )
    return lines


def _headline(profile: Profile, place: int) -> str:
    arch, first = profile.archs[place + 1], profile.archs[0]
    compared = [(task.label, task.comparisons[place]) for task in profile.tasks]
    results = [(label, each) for label, each in compared if each is not None]
    if not results:
        return f"{arch} against {first}: no task is done yet."
    missing = f" ({len(results)} of {len(compared)} tasks are done)" if len(results) < len(compared) else ""
    speeds = [(label, each.end, speed) for label, each in results if (speed := each.speeds[profile.share])]
    if profile.seeds < profile.needed:
        leads = [(label, each.end.gap) for label, each in results]
        if profile.until:
            leads = [(label, speed.factor - 1) for label, _, speed in speeds]
        higher, lower = (_names([label for label, lead in leads if sign * lead > 0]) for sign in (1, -1))
        more, less = ("faster", "slower") if profile.until else ("higher", "lower")
        return f"{arch} against {first}: so far {more} on {higher}, {less} on {lower}{missing}."
    faster = [label for label, end, speed in speeds if speed.low > 1 and end.state != "undecided"]
    slower = [label for label, end, speed in speeds if speed.high < 1 and end.state != "undecided"]
    labels: dict[str, list[str]] = {state: [] for state in STATES}
    for label, each in results:
        nothing = each.standing in ("both at chance", "both saturated")
        labels["nothing" if nothing else each.end.state].append(label)
    optional = ("nothing", "undecided")
    learns = f"faster on {_names(faster)}, slower on {_names(slower)}"
    if profile.until:
        return f"{arch} against {first}: {learns}{missing}."
    ends = [f"{STATES[state]} {_names(of)}" for state, of in labels.items() if of or state not in optional]
    return f"{arch} against {first}: {learns}; {', '.join(ends)}{missing}."


def _names(labels: Sequence[str]) -> str:
    return listed(labels) if labels else "none"


def verdicts(profile: Profile) -> list[str]:
    """A sentence for each task and architecture but the first; for a single architecture, its score; with one seed, a
    line for each task."""
    if len(profile.archs) == 1:
        return [_only_score(profile, task) for task in profile.tasks]
    if profile.seeds == 1:
        return [
            f"{task.label}: {', '.join(_single(profile, task, arm) for arm in task.arms)}." for task in profile.tasks
        ]
    return [
        f"{task.label}: {_verdict(profile, task, task.arms[place + 1], result)}"
        for place in range(len(profile.archs) - 1)
        for task in profile.tasks
        for result in [task.comparisons[place]]
    ]


def growth(profile: Profile) -> list[str]:
    """A sentence for each task at several sizes and each architecture but the first: how its lead changes between the
    first size and the last one."""
    lines: list[str] = []
    if profile.until:  # final scores say nothing
        return lines
    for name in dict.fromkeys(task.name for task in profile.tasks if task.size is not None):
        rows = [task for task in profile.tasks if task.name == name]
        small, large = rows[0], rows[-1]
        for place, arch in enumerate(profile.archs[1:]):
            before, after = small.comparisons[place], large.comparisons[place]
            if len(rows) > 1 and before and after and min(before.end.seeds, after.end.seeds) > 2:
                change, normal = (
                    _change(after.end.gap, getattr(after.end, of), before.end.gap, getattr(before.end, of))
                    for of in ("safe", "normal")
                )
                means = "grows" if change.low > 0 else "shrinks" if change.high < 0 else "no change is shown"
                if "undecided" in (before.end.state, after.end.state):
                    means = "undecided"
                lines.append(
                    f"{name}: {arch} against {profile.archs[0]}, {_plain(before.end.gap)} points at {small.size} and "
                    f"{_plain(after.end.gap)} at {large.size}: {means} {_interval(change)}; if further runs differ as "
                    f"these do, {_interval(normal)}."
                )
    return lines


def _change(after: float, now: Interval, before: float, then: Interval) -> Interval:
    """The interval of `after` - `before`, of which each has its own: half-widths add up as the square root of the sum
    of their squares, on each side (MOVER, Zou and Donner 2008)."""
    below, above = math.hypot(after - now.low, then.high - before), math.hypot(now.high - after, before - then.low)
    return Interval(after - before - below, after - before + above)


def noise(profile: Profile) -> list[str]:
    """A sentence for each task on the first architecture against itself with other seeds."""
    first, lines = profile.archs[0], []
    for task in profile.tasks:
        if task.itself is not None and task.itself.end.seeds > 2:
            end, speed = task.itself.end, task.itself.speeds[profile.share]
            parts = [] if profile.until else [f"{_plain(end.gap)} points {_interval(end.safe)}"]
            faster = factor(speed) if speed else NOT_KNOWN
            parts += [f"{faster} times as fast"] if faster != NOT_KNOWN else []
            shown = ": a false verdict" if end.state in ("higher", "lower") and not profile.until else ""
            result = ", ".join(parts) or "too few runs get there"
            lines.append(f"{task.label}: {first} with other seeds against {first}: {result}{shown}.")
    return lines


def planned(profile: Profile) -> list[str]:
    """A sentence for each tuned task on the differences that its seeds can show."""
    lines = []
    for task in profile.tasks:
        if task.visible is not None:
            more = "more than 1,000" if task.needed is None else f"{task.needed:,}"
            like = "if further runs are like the tuning runs"
            shows = f"{_plain(task.visible)} points {like}; 10 points need {more}"
            if task.visible == math.inf:
                shows = f"no difference, as a verdict needs {profile.needed}; 10 points need {more} {like}"
            lines.append(f"{task.label}: {count_of(profile.seeds, 'seed')} of each will show {shows}.")
    return lines


def factor(speed: Speed) -> str:
    """`5.3 [3.1, 12]`; `more than 3.1` where no run of the slower one gets there; or NOT_KNOWN."""
    if (speed.low, speed.high) == (0, math.inf):
        return NOT_KNOWN
    ends = f"[{_times(speed.low)}, {_times(speed.high) if speed.high < math.inf else 'unbounded'}]"
    if speed.factor == math.inf:
        return f"more than {_times(speed.low)}" if speed.low > 1 else NOT_KNOWN
    if speed.factor == 0:
        return f"less than {_times(speed.high)}" if speed.high < 1 else NOT_KNOWN
    return f"{_times(speed.factor)} {ends}"


def _times(number: float) -> str:
    return f"{number:.0f}" if number >= 20 else f"{number:.2g}"


def _only_score(profile: Profile, task: TaskProfile) -> str:
    arm = task.arms[0]
    if arm.score is None:
        return f"{task.label}: {_missing(arm)}."
    if profile.until:
        return f"{task.label}: {_reached(arm, profile.until, task)} get {percent(profile.until)} right."
    interval = f" [{percent(arm.score.low)}, {percent(arm.score.high)}]" if arm.score.low < arm.score.high else ""
    seeds = count_of(arm.score.runs, "seed")
    return f"{task.label}: {percent(arm.score.mean)}{interval}, {seeds}; guessing scores {percent(task.chance)}."


def _single(profile: Profile, task: TaskProfile, arm: Arm) -> str:
    """The score of each of a few runs; with `until`, the step at which it gets there."""
    if arm.score is None:
        return f"{arm.arch} {_missing(arm)}"
    results = [*map(percent, arm.score.values)]
    if profile.until:
        steps = arm.solved_at(profile.until, task.slices)
        results = [f"not in {task.steps:,} steps" if step is None else f"at step {step:,}" for step in steps]
    return f"{arm.arch} {listed(results)}"


def _missing(*arms: Arm) -> str:
    failed = [arm.arch for arm in arms if arm.failed and not arm.waiting]
    return f"every run of {listed(failed)} failed" if failed else "not trained yet"


def _verdict(profile: Profile, task: TaskProfile, arm: Arm, versus: Versus | None) -> str:
    first = task.arms[0]
    if versus is None or arm.score is None or first.score is None:
        return f"{_missing(*(each for each in (arm, first) if each.score is None))}."
    result = versus.end
    seeds = counts_of([(each.arch, each.score.runs) for each in (arm, first) if each.score], "seed")
    if result.seeds <= 2:
        return f"{'; '.join(_single(profile, task, each) for each in (arm, first))}: undecided."
    speed = _speed(arm, first, versus.speeds[profile.share], profile.share)
    if profile.until:
        reached = f"{_reached(arm, profile.until, task)} and {_reached(first, profile.until, task)} get there"
        return f"{speed} {reached}{': undecided, as seeds are missing' if result.state == 'undecided' else ''}."
    return f"{speed} At the end, {_end(arm, first, task.chance, versus)}, {seeds}."


def _reached(arm: Arm, share: float, task: TaskProfile) -> str:
    steps = arm.solved_at(share, task.slices)
    return f"{sum(step is not None for step in steps)} of {count_of(len(steps), 'run')} of {arm.arch}"


def _speed(arm: Arm, first: Arm, speed: Speed | None, share: float) -> str:
    much = "half" if share == HALF else percent(share)
    if speed is None or (0 < speed.factor < math.inf and factor(speed) == NOT_KNOWN):
        return f"too few runs of {arm.arch} and {first.arch} get {much} right to tell which is faster."
    if speed.factor in (0, math.inf):
        only, other = (arm, first) if speed.factor else (first, arm)
        bound = speed.low if speed.factor else 1 / speed.high
        never = not min(speed.reached)
        if bound <= 1:
            rest = "does not" if never else "in most runs does not"
            return f"{only.arch} gets {much} right, and {other.arch} {rest} in these steps."
        times = f"more than {_times(bound)} times as fast as {other.arch}"
        return f"{only.arch} gets {much} right {times}{', which does not in these steps' if never else ''}."
    return f"{arm.arch} gets {much} right {factor(speed)} times as fast as {first.arch}."


def _end(arm: Arm, first: Arm, chance: float, versus: Versus) -> str:
    """The final scores in words, without the number of seeds."""
    result = versus.end
    better, worse, safe, normal = arm, first, result.safe, result.normal
    if result.gap < 0:
        better, worse, safe, normal = first, arm, -safe, -normal
    assert better.score is not None
    assert worse.score is not None
    scores = f"{percent(better.score.mean)} and {percent(worse.score.mean)}"
    if versus.standing == "both saturated":
        return f"both are saturated ({scores}): nothing to compare"
    if versus.standing == "both at chance":
        return f"neither is above chance ({scores}; guessing scores {percent(chance)}): nothing to compare"
    if versus.standing == "one at chance":  # how far above it is a matter of the number of possible answers
        verdict = {"higher": "better", "lower": "better", "open": "no difference shown"}.get(result.state, "undecided")
        scored = f"{percent(better.score.mean)} [{percent(better.score.low)}, {percent(better.score.high)}]"
        guessing = f"{percent(worse.score.mean)}; guessing scores {percent(chance)}"
        return f"{better.arch} scores {scored} and {worse.arch} is at chance ({guessing}): {verdict}"
    gap, interval = f"{_plain(abs(result.gap))} points", _interval(safe)
    if result.state == "open":
        return f"no difference is shown: {_plain(result.gap)} points {_interval(result.safe)}"
    if result.state != "undecided":
        normally = _interval(normal)
        return f"{better.arch} beats {worse.arch} by {gap} {interval}; if further runs differ as these do, {normally}"
    if gap == "0.0 points":
        return f"{arm.arch} and {first.arch} are level {interval}: undecided"
    return f"{better.arch} is ahead of {worse.arch} by {gap} {interval}: undecided"


def _interval(interval: Interval) -> str:
    return f"[{_plain(interval.low)}, {_plain(interval.high)}]"


def _plain(difference: float) -> str:
    return points(difference).lstrip("+")


def caveats(profile: Profile) -> list[str]:
    """The limits of the comparison, a sentence each."""
    lines = [
        "These are tiny models, trained for minutes: a ranking at one size need not hold at another size, or after "
        "more steps.",
    ]
    if profile.until:
        lines.append(
            "Runs end once they are right often enough, so final scores say nothing; a run that has not is censored."
        )
    if profile.quick:
        lines.append("Quick: one rate for all, and a third of the training.")
    else:
        lines.append(
            "Rates were chosen by three tuning seeds each, on a validation split; the numbers come from other seeds, "
            "on the test split. Equal seeds share data and questions."
        )
    arms = [(task, arm) for task in profile.tasks for arm in task.arms]
    if edges := [f"{arm.arch} on {task.label} ({arm.rate.lr:g})" for task, arm in arms if arm.rate and arm.at_edge]:
        lines.append(f"Rates at the edge of those that were tried: {listed(edges)}.")
    if failed := [f"{arm.failed} of {arm.arch} on {task.label}" for task, arm in arms if arm.failed]:
        left_out = f"Runs that failed and are left out: {listed(failed)}."
        undecided = "With fewer seeds than planned, a comparison is undecided"
        lines.append(f"{left_out} {undecided}, and no rate with a failed tuning run is chosen.")
    if profile.seeds >= profile.needed and len(profile.archs) > 1:
        lines.append("More seeds, added after this verdict was read, would make wrong verdicts more frequent.")
    if profile.matched != "state,parameters" and len(profile.archs) > 1:
        lines.append("Architectures differ in FLOPs and in what --match has not made equal, as the costs show.")
    lines.append("Speeds were measured while other runs shared the machine.")
    return lines

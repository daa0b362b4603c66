"""A profile in words: who is better at what, task by task, and what limits the comparison."""

from collections.abc import Sequence

from canonlm.experiments.profile_results import Arm, Profile, TaskProfile
from canonlm.report.format import count_of, listed, percent, points
from canonlm.runs.seed_statistics import Comparison

STATES = {
    "higher": "better on",
    "lower": "worse on",
    "alike": "no difference shown on",
    "undecided": "undecided on",
}


def headlines(profile: Profile) -> list[str]:
    """One sentence for each architecture but the first: on which tasks it is better. Then what is uncertain."""
    if len(profile.archs) == 1:
        return [f"{profile.archs[0]} alone: nothing is compared."]
    lines = [_headline(profile, place) for place in range(len(profile.archs) - 1)]
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
    if profile.seeds < profile.needed:
        higher, lower = ([label for label, each in results if sign * each.gap > 0] for sign in (1, -1))
        return f"{arch} against {first}: so far higher on {_names(higher)}, lower on {_names(lower)}{missing}."
    labels: dict[str, list[str]] = {state: [] for state in STATES}
    for label, each in results:
        labels[each.state if each.seeds >= profile.needed else "undecided"].append(label)
    parts = [f"{STATES[state]} {_names(of)}" for state, of in labels.items() if of or state != "undecided"]
    return f"{arch} against {first}: {', '.join(parts)}{missing}."


def _names(labels: Sequence[str]) -> str:
    return listed(labels) if labels else "none"


def verdicts(profile: Profile) -> list[str]:
    """A sentence for each task and architecture but the first; for a single architecture, its score; with one seed, a
    line for each task."""
    if len(profile.archs) == 1:
        return [_only_score(task) for task in profile.tasks]
    if profile.seeds == 1:
        return [f"{task.label}: {', '.join(_single(arm) for arm in task.arms)}." for task in profile.tasks]
    return [
        f"{task.label}: {_verdict(profile, task.arms[place + 1], task.arms[0], result)}"
        for place in range(len(profile.archs) - 1)
        for task in profile.tasks
        for result in [task.comparisons[place]]
    ]


def _only_score(task: TaskProfile) -> str:
    arm = task.arms[0]
    if arm.score is None:
        return f"{task.label}: {_missing(arm)}."
    interval = f" [{percent(arm.score.low)}, {percent(arm.score.high)}]" if arm.score.low < arm.score.high else ""
    seeds = count_of(arm.score.runs, "seed")
    return f"{task.label}: {percent(arm.score.mean)}{interval}, {seeds}; guessing scores {percent(task.chance)}."


def _single(arm: Arm) -> str:
    return f"{arm.arch} {_missing(arm) if arm.score is None else percent(arm.score.mean)}"


def _missing(*arms: Arm) -> str:
    failed = [arm.arch for arm in arms if arm.failed and not arm.waiting]
    return f"every run of {listed(failed)} failed" if failed else "not trained yet"


def _verdict(profile: Profile, arm: Arm, first: Arm, result: Comparison | None) -> str:
    if result is None or arm.score is None or first.score is None:
        return f"{_missing(*(each for each in (arm, first) if each.score is None))}."
    seeds = f"{count_of(result.seeds, 'seed')} each"
    gap = f"{_plain(abs(result.gap))} points"
    if result.seeds <= 2:
        values = [
            f"{each.arch} {' and '.join(map(percent, each.score.values[:2]))}" for each in (arm, first) if each.score
        ]
        return f"{'; '.join(values)}: undecided."
    better, worse, low, high = arm, first, result.low, result.high
    if result.gap < 0:
        better, worse, low, high = first, arm, -result.high, -result.low
    interval = f"[{_plain(low)}, {_plain(high)}]"
    if result.seeds < profile.needed and gap == "0.0 points":
        return f"{arm.arch} and {first.arch} are level {interval}, {seeds}: undecided."
    if result.seeds < profile.needed:
        return f"{better.arch} is ahead of {worse.arch} by {gap} {interval}, {seeds}: undecided."
    if result.state == "alike":
        return (
            f"no difference shown between {arm.arch} and {first.arch}: {_plain(result.gap)} points "
            f"[{_plain(result.low)}, {_plain(result.high)}], {seeds}."
        )
    if not result.on_average:
        return (
            f"the runs of {better.arch} score higher than those of {worse.arch}, by {gap} {interval}, {seeds}; "
            "the mean is not shown to be higher."
        )
    return f"{better.arch} beats {worse.arch} by {gap} {interval}, {seeds}."


def _plain(difference: float) -> str:
    return points(difference).lstrip("+")


def caveats(profile: Profile) -> list[str]:
    """The limits of the comparison, a sentence each."""
    lines = [
        "These are tiny models, trained for minutes: a ranking at this size need not hold at another size, or after "
        "more steps.",
    ]
    if profile.quick:
        lines.append("Quick: one rate for all, and a third of the training.")
    else:
        lines.append(
            "Rates were chosen by one tuning seed each, on a validation split; the numbers come from other seeds, on "
            "the test split. Equal seeds share data and questions."
        )
    arms = [(task, arm) for task in profile.tasks for arm in task.arms]
    if edges := [f"{arm.arch} on {task.label} ({arm.rate.lr:g})" for task, arm in arms if arm.rate and arm.at_edge]:
        lines.append(f"Rates at the edge of the three that were tried: {listed(edges)}.")
    if failed := [f"{arm.failed} of {arm.arch} on {task.label}" for task, arm in arms if arm.failed]:
        lines.append(f"Runs that failed and are left out: {listed(failed)}.")
    if profile.seeds >= profile.needed and len(profile.archs) > 1:
        lines.append("More seeds, added after this verdict was read, would make wrong verdicts more frequent.")
    if not profile.matched and len(profile.archs) > 1:
        lines.append("Architectures differ in parameters and FLOPs, as the costs show; see --match parameters.")
    lines.append("Speeds were measured while other runs shared the machine.")
    return lines

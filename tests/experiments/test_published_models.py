"""The mixed model of the published models, against means of groups and against numbers that were drawn."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from canonlm.experiments import published

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published_models.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_kept_numbers_and_the_mean_of_groups(script):
    about, finals = script["models"](), published.table("finals")
    scores = dict(zip(finals["model"], finals["Hella"], strict=True))
    models = about.pop("model")
    result = script["fit"](about | {"score": [scores[model] for model in models]})
    kept = json.loads(script["RESULT"].read_text())["Hella"]
    assert result._asdict() == pytest.approx({key: value for key, value in kept.items() if key != "seeds"}, rel=1e-3)
    groups: dict[tuple, dict[int, list[float]]] = {}
    for number, model in enumerate(models):
        group = groups.setdefault(tuple(about[key][number] for key in ("size", "family", "tokens")), {0: [], 1: []})
        group[about["canon"][number]].append(scores[model])
    gains = [np.mean(group[1]) - np.mean(group[0]) for group in groups.values()]
    assert len(gains) == 13
    assert result.canon == pytest.approx(np.mean(gains), abs=0.05)


def test_finds_what_was_drawn(script):
    """The gain within its interval in 95 % of tables; the standard deviations on average."""
    about, rng, results = script["models"](), np.random.default_rng(0), []
    about.pop("model")
    groups = sorted(set(zip(about["size"], about["family"], about["tokens"], strict=True)))
    for _ in range(20):
        level, gain = rng.normal(0, 3, len(groups)), rng.normal(1, 0.5, len(groups))
        score = []
        for *group, rate, canon in zip(
            *(about[key] for key in ("size", "family", "tokens", "rate", "canon")), strict=True
        ):
            at = groups.index(tuple(group))
            score.append(50 + level[at] + 0.3 * rate + canon * gain[at] + rng.normal(0, 0.4))
        results.append(script["fit"](about | {"score": score}))
    assert sum(each.low <= 1 <= each.high for each in results) >= 17
    assert np.mean([each.canon for each in results]) == pytest.approx(1, abs=0.15)
    assert np.mean([each.rate for each in results]) == pytest.approx(0.3, abs=0.1)
    assert np.mean([each.between for each in results]) == pytest.approx(0.5, abs=0.15)
    assert np.mean([each.rest for each in results]) == pytest.approx(0.4, abs=0.05)

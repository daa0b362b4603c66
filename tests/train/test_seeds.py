"""Weights, training windows and test samples have separate seeds; settings are chosen on a separate split."""

import numpy as np
import pytest
import torch

from canonlm import tasks
from canonlm.core.distributed import World
from canonlm.launch.recipes import load_preset
from canonlm.runs.identity import group, identity
from canonlm.train import data
from canonlm.train.build import build_model
from canonlm.train.config import resolve
from canonlm.train.load_config import merge


def run_of(preset="depo", **changes):
    raw = merge(load_preset(preset, "tiny").run, {"arch": "llama", "train": {"eval_size": 4}})
    return resolve(merge(raw, changes))


def weights(run):
    return [p.clone() for p in build_model(run).module.parameters()]


def windows(run):
    return data.stream(run).rows(0, 4).input_ids


def samples(run):
    stream = data.evaluation(run, World(torch.device("cpu"))).stream
    return [stream.task.sample(stream.split, stream.seed, i).tokens.tolist() for i in range(20)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"train": {"seed": 7}}, {"weights", "windows", "samples"}),
        ({"data": {"seed": 7}}, {"windows"}),
        ({"train": {"eval_seed": 7}}, {"samples"}),
        ({"train": {"eval_split": "validation"}}, {"samples"}),
        ({"train": {"seed": 7, "eval_seed": 0}, "data": {"seed": 0}}, {"weights"}),
    ],
)
def test_each_seed_changes_only_its_subject(changes, changed):
    plain, other = run_of(), run_of(**changes)
    assert ("weights" in changed) == (not same(weights(plain), weights(other)))
    assert ("windows" in changed) == (not torch.equal(windows(plain), windows(other)))
    assert ("samples" in changed) == (samples(plain) != samples(other))
    assert identity(plain.model_dump()) != identity(other.model_dump())


def test_identities_and_groups():
    now = run_of().model_dump()
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in now.items()}
    del before["data"]["seed"], before["train"]["eval_seed"], before["train"]["eval_split"]
    assert identity(before) == identity(now) == "0d46942283f3"  # as of the version before
    assert group(before) == group(now)
    # Runs that are tested on different splits are not repeats; those with different seeds are.
    assert group(now) != group(run_of(train={"eval_split": "validation"}).model_dump())
    assert group(now) == group(run_of(train={"eval_seed": 3}, data={"seed": 4}).model_dump())


@pytest.mark.parametrize("task", ["depo", "mano", "brevo", "copying", "parity"])
def test_validation_samples_follow_the_test_distribution(task):
    built = tasks.get(**load_preset(task, "tiny").run["task"])

    def drawn(split):
        return [built.sample(split, 0, i) for i in range(300)]

    def sizes(samples):
        return np.mean([len(sample.tokens) for sample in samples]), {str(q.slice) for s in samples for q in s.queries}

    test, validation, train = map(drawn, ("test", "validation", "train"))
    assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(test[:20], validation[:20], strict=True))
    assert sizes(test)[0] == pytest.approx(sizes(validation)[0], rel=0.1)
    assert sizes(test)[1] == sizes(validation)[1]
    if task not in ("mano", "parity"):  # these have few samples, so some are drawn twice
        sets = [{tuple(sample.tokens.tolist()) for sample in samples} for samples in (test, validation, train)]
        assert len(set.union(*sets)) == sum(map(len, sets))


def test_capo_is_asked_about_the_people_it_trained_on():
    run = run_of("capo", data={"seed": 5}, train={"seed": 1, "steps": 10})
    assert data.evaluation(run, World(torch.device("cpu"))).stream.seed == 5
    with pytest.raises(ValueError, match=r"train.eval_seed: expected no value, as capo tests what it trained on"):
        run_of("capo", train={"eval_seed": 3})


def test_text_has_no_test_samples_to_choose():
    text = {"task": None, "text": {"sources": {"a": {"path": "python-stdlib"}}}, "data": {"loss_on": "all"}}
    message = "train.eval_seed: expected no value, as text is evaluated on its held-out part"
    with pytest.raises(ValueError, match=message):
        run_of(**text, train={"eval_seed": 3})

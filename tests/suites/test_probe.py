"""The probe finds information that is in the states, and none in noise."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from canonlm import tasks
from canonlm.suites.probe import probe
from canonlm.tasks.lano import Grammar


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "g.txt"
    Grammar.random(7, sizes=(1, 3, 3, 4), alternatives=(2, 3), repeat_symbols=False).write(path)
    return tasks.get("lano", grammar=str(path))


class States(nn.Module):
    """A model whose hidden states are `features(tree)`, found by the sentence."""

    def __init__(self, task, width, features):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.trees, self.width, self.features = {}, width, features
        for split in ("train", "test"):
            for index in range(200):
                tree = task.grammar.sample(split, 0, index)
                self.trees[tuple(tree.tokens.tolist())] = tree

    def forward(self, ids, use_cache, output_hidden_states):
        assert output_hidden_states
        states = torch.zeros(1, ids.shape[1], self.width)
        states[0, 1:] = self.features(self.trees[tuple(ids[0, 1:].tolist())])
        return SimpleNamespace(hidden_states=[torch.full_like(states, torch.nan), states])


def everything(tree):
    """The symbol above the token on every level, and whether it ends there, mixed by a fixed rotation."""
    columns = [nn.functional.one_hot(torch.from_numpy(tree.labels[:, level]).long(), 4) for level in range(3)]
    known = torch.cat([*columns, torch.from_numpy(tree.boundaries)], 1).float()
    return known @ torch.linalg.qr(torch.randn(15, 15, generator=torch.Generator().manual_seed(0)))[0]


def noise(tree):
    seed = zlib.crc32(tree.tokens.tobytes())
    return torch.randn(len(tree.tokens), 15, generator=torch.Generator().manual_seed(seed))


def test_linearly_encoded_symbols_are_found(task):
    levels = probe(States(task, 15, everything), task, layer=-1, fit=120, test=60)
    assert [(x.level, x.symbols) for x in levels] == [(1, 3), (2, 3)]  # the root is always the same
    for x in levels:
        assert (x.symbol, x.symbol_at_end, x.boundary) == (1, 1, 1)
        assert 0 < x.symbol_guess < 0.9
        assert 0.5 <= x.boundary_guess < 0.95


def test_noise_scores_no_more_than_guessing_the_commonest_answer(task):
    levels = probe(States(task, 15, noise), task, layer=1, fit=120, test=60)
    trees = [task.grammar.sample("test", 0, index) for index in range(60)]
    for x in levels:
        symbols = np.concatenate([tree.labels[:, x.level] for tree in trees])
        ends = np.concatenate([tree.boundaries[:, x.level] for tree in trees])
        assert x.symbol_guess == max(np.mean(symbols == s) for s in range(3))
        assert x.symbol_at_end_guess == max(np.mean(symbols[ends] == s) for s in range(3))
        assert x.boundary_guess == max(ends.mean(), 1 - ends.mean())
        assert x.symbol < x.symbol_guess + 0.05
        assert x.symbol_at_end < x.symbol_at_end_guess + 0.05
        assert x.boundary < x.boundary_guess + 0.02

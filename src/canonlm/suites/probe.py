"""Linear probes from a model's hidden states to the parse tree of a sentence.

For every level of a Lano grammar, one linear classifier predicts from a token's hidden state the symbol of the level
above the token, and another whether that symbol's node ends at the token (Physics of Language Models, Part 1, arXiv
2305.13673, Sec. 4). The model is never changed. A symbol is only determined once its node is complete, so tokens at
which a node ends also have scores of their own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from canonlm.tasks.lano import Lano

RIDGE = 1e-4  # weight decay of the classifiers, per standardized feature


@dataclass(frozen=True)
class LevelProbe:
    """Shares of test tokens predicted right. `level` counts from the root (0 is the root itself); guesses: the most
    frequent symbol (of all tokens, of those at ends), or the more frequent of "ends" and "continues"."""

    level: int
    symbols: int
    symbol: float
    symbol_guess: float
    symbol_at_end: float
    symbol_at_end_guess: float
    boundary: float
    boundary_guess: float


@torch.no_grad()
def hidden_states(
    model: PreTrainedModel, task: Lano, split: str, seed: int, count: int, layer: int, device: torch.device
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """(features float32 [tokens, hidden], symbols int32 [tokens, levels], ends bool [tokens, levels]) of sentences.

    layer: as in `output_hidden_states`: 0 is the embedding, -1 what the output head reads.
    """
    features, symbols, ends = [], [], []
    for index in range(count):
        sample = task.sample(split, seed, index)
        ids = torch.from_numpy(sample.tokens).long()[None].to(device)
        states = model(ids, use_cache=False, output_hidden_states=True).hidden_states[layer]
        features.append(states[0, 1:].float().cpu())  # without bos, which is under no symbol
        tree = task.grammar.sample(split, seed, index)
        symbols.append(tree.labels)
        ends.append(tree.boundaries)
    return torch.cat(features), np.concatenate(symbols), np.concatenate(ends)


def probe(
    model: PreTrainedModel, task: Lano, *, layer: int = -1, seed: int = 0, fit: int = 200, test: int = 100
) -> list[LevelProbe]:
    """One entry per level below the root that has more than one symbol: fitted on `fit` training sentences, scored on
    `test` test sentences. Deterministic on one machine: the classifiers are convex and start at zero.

    FloatingPointError: hidden states are not finite.
    """
    device = next(model.parameters()).device
    features, symbols, ends = hidden_states(model, task, "train", seed, fit, layer, device)
    held_features, held_symbols, held_ends = hidden_states(model, task, "test", seed, test, layer, device)
    not_finite = sum(int((~states.isfinite()).any(1).sum()) for states in (features, held_features))
    if not_finite:
        where = f"{not_finite:,} of {len(features) + len(held_features):,} tokens"
        raise FloatingPointError(f"the model's hidden states are not finite (NaN) at {where}")
    mean, scale = features.mean(0), features.std(0).clamp_min(1e-6)
    x, held_x = (features - mean) / scale, (held_features - mean) / scale
    probes = []
    for level in range(symbols.shape[1]):
        if symbols[:, level].max() == 0:
            continue
        symbol_right = _fit(x, symbols[:, level])(held_x) == held_symbols[:, level]
        boundary_right = _fit(x, ends[:, level])(held_x) == held_ends[:, level]
        at_end = held_ends[:, level].astype(bool)
        probes.append(
            LevelProbe(
                level=level,
                symbols=int(symbols[:, level].max()) + 1,
                symbol=float(symbol_right.mean()),
                symbol_guess=_commonest(held_symbols[:, level]),
                symbol_at_end=float(symbol_right[at_end].mean()),
                symbol_at_end_guess=_commonest(held_symbols[at_end, level]),
                boundary=float(boundary_right.mean()),
                boundary_guess=_commonest(held_ends[:, level]),
            )
        )
    return probes


def _commonest(values: np.ndarray) -> float:
    """The share of the most frequent value."""
    return float(np.bincount(values.astype(np.int64)).max() / len(values))


def _fit(x: torch.Tensor, y: np.ndarray):
    """Multinomial logistic regression; returns the classifier: features → classes, as numpy."""
    target = torch.from_numpy(y.astype(np.int64))
    weight = torch.zeros(x.shape[1], int(target.max()) + 1, requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight + bias, target) + RIDGE * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda features: (features @ weight + bias).argmax(1).numpy()

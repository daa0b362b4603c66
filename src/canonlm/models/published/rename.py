"""Maps rows of the release's tensors to our tensors."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from canonlm.core import weights
from canonlm.models.config import CanonLMConfig


@dataclass(frozen=True)
class Names:
    """A format's names of our modules: `{"attn.canonB": "mixer.canonB_q mixer.canonB_k mixer.canonB_v"}` for one of
    theirs that holds the rows of three of ours, one after the other. Entries for modules that a model lacks are
    ignored."""

    top: dict[str, str]
    layers: str  # the name of the list of layers
    layer: dict[str, str]  # in a layer
    orders: dict[str, Tensor] = field(default_factory=dict)  # by our module in a layer: its rows are theirs[order]
    unread: dict[str, tuple[int, ...]] = field(default_factory=dict)  # in a layer: zeros that no computation reads
    prefix: str = ""


@dataclass(frozen=True)
class Move:
    """One of their tensors, and our tensors that it contains."""

    theirs: str
    ours: tuple[str, ...]
    orders: tuple[Tensor | None, ...] = ()
    tied_to: str | None = None  # another of their tensors, which must be equal; then this one may be missing
    unread: tuple[int, ...] | None = None  # the shape, if it holds nothing

    def shape(self, ours: Mapping[str, torch.Size]) -> tuple[int, ...]:
        """The shape that their tensor must have, by the shapes of ours."""
        if self.unread is not None:
            return self.unread
        return (sum(ours[name][0] for name in self.ours), *ours[self.ours[0]][1:])

    def read(self, theirs: Tensor, ours: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors (views, where the order is the same)."""
        if self.unread is None:
            pieces = theirs.split([ours[name][0] for name in self.ours])
            for name, piece, order in zip(self.ours, pieces, self.orders, strict=True):
                yield name, piece if order is None else piece[order]

    def write(self, ours: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `read`: a new tensor."""
        if self.unread is not None:
            like = next(iter(ours.values()))
            return torch.zeros(self.unread, dtype=like.dtype, device=like.device)
        pieces = zip((ours[name] for name in self.ours), self.orders, strict=True)
        return torch.cat([tensor if order is None else tensor[order.argsort()] for tensor, order in pieces])


def list_moves(names: Names, config: CanonLMConfig, ours: Collection[str]) -> list[Move]:
    """All of their tensors for a model whose parameters are called `ours`."""
    moves = list(_in_module(names, names.top, "", "", ours))
    for layer_idx in range(config.num_hidden_layers):
        their_prefix, our_prefix = f"{names.layers}.{layer_idx}.", f"model.layers.{layer_idx}."
        moves += _in_module(names, names.layer, their_prefix, our_prefix, ours)
        moves += [Move(names.prefix + their_prefix + name, (), unread=shape) for name, shape in names.unread.items()]
    if config.tie_word_embeddings:
        embedding = next(move.theirs for move in moves if move.ours == ("model.embed_tokens.weight",))
        moves = [replace(move, tied_to=embedding) if move.ours == ("lm_head.weight",) else move for move in moves]
    assert {name for move in moves for name in move.ours} == set(ours)
    return moves


def _in_module(
    names: Names, table: dict[str, str], theirs_prefix: str, ours_prefix: str, ours: Collection[str]
) -> Iterator[Move]:
    for theirs, modules in table.items():
        orders = tuple(names.orders.get(module) for module in modules.split())
        for leaf in ("", ".weight", ".bias"):
            held = tuple(f"{ours_prefix}{module}{leaf}" for module in modules.split())
            if held[0] in ours:
                yield Move(f"{names.prefix}{theirs_prefix}{theirs}{leaf}", held, orders)


def check_state(moves: list[Move], state: Mapping[str, Tensor], ours: Mapping[str, torch.Size]) -> None:
    """ValueError that lists everything wrong with the tensors of a checkpoint."""
    headers = {name: weights.header(tensor) for name, tensor in state.items()}
    wrong = [complaint] if (complaint := weights.not_floats(headers)) else []
    wrong += [f"unknown {name}" for name in sorted(state.keys() - {move.theirs for move in moves})]
    for move in moves:
        if move.theirs not in state:
            wrong += [] if move.tied_to in state else [f"missing {move.theirs}"]
        elif (shape := tuple(state[move.theirs].shape)) != move.shape(ours):
            wrong.append(f"{move.theirs} is {shape}, not {move.shape(ours)}")
        elif (tied := state.get(move.tied_to or "")) is not None and not torch.equal(state[move.theirs], tied):
            wrong.append(f"{move.theirs} differs from {move.tied_to}, although tied")
    if wrong:
        raise ValueError(f"state: {'; '.join(wrong)}")

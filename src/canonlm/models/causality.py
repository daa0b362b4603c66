"""Checks of a model before training, on the built model with a few tokens; the same for every model.

finite      logits, loss and gradients are finite
causality   later tokens do not change the logits of earlier ones
isolation   if a run isolates documents: the tokens of one document do not change the logits of another

Causality is checked in evaluation mode and in training mode: routing in which tokens compete for places in an expert is
causal in one and not in the other. All forward passes draw the same random numbers, with dropout modules off. Every
process of a sharded model must call this.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from canonlm.core.borrowed import keeping_modes
from canonlm.core.errors import InvalidSetting
from canonlm.models.hf_small_configs import refusal
from canonlm.models.interface import LanguageModel
from canonlm.ops.varlen import as_documents

LENGTH = 24


def check(model: LanguageModel, *, isolated: bool = False) -> None:
    """InvalidSetting, in one line with advice, for a model that fails a check. Weights and random states do not change.

    isolated: the run isolates the documents of a window.
    """
    module = model.module
    with (
        _without_zero_weights(module),
        torch.compiler.set_stance("force_eager"),
        _without_dropout(model),
        keeping_modes(module),
    ):
        try:
            module.eval()
            _check_finite(model)
            with torch.no_grad():
                _check_causality(model)
                if isolated:
                    _check_isolation(model)
                module.train()
                _check_causality(model)
        except InvalidSetting:
            raise
        except Exception as error:  # other people's code, with tokens and sizes that it may never have run with
            raise refusal(model.arch, "does not run here", error) from error
        finally:
            for part in module.modules():
                if isinstance(part, FSDPModule):  # a forward pass leaves the root's weights gathered
                    part.reshard()
            module.zero_grad(set_to_none=True)


def _check_finite(model: LanguageModel) -> None:
    ids, targets = _tokens(model, 2), _tokens(model, 2).roll(-1, dims=1)
    total = model.loss(ids, targets, None, float(targets.numel())).total
    total.backward()
    bad = [
        name
        for name, p in model.module.named_parameters()
        if p.grad is not None and not _local(p.grad).isfinite().all()
    ]
    if not total.isfinite() or bad:
        what = f"the gradient of {bad[0]}" if bad else "the loss"
        raise InvalidSetting(
            "arch", f"arch: {model.arch} cannot be trained: {what} is not finite at its initial weights"
        )


def _check_causality(model: LanguageModel) -> None:
    ids = _tokens(model, 1)
    length = ids.shape[1]
    before = _logits(model, ids)
    if not before.isfinite().all():
        raise InvalidSetting(
            "arch", f"arch: {model.arch} cannot be trained: its logits are not finite at its initial weights"
        )
    for token in sorted({length // 8, length // 2 + 1, length - 1} - {0}):
        changed = ids.clone()
        changed[:, token:] = _other_tokens(model, ids[:, token:])
        position = _first_change(before[:, :token], _logits(model, changed)[:, :token])
        if position is not None and not (model.module.training and _draws(model, ids)):
            why = f"a change of token {token} changed the output at token {position}"
            how = "it cannot be trained as a language model"
            if getattr(model.module.config, "is_decoder", None) is False:
                how += f" unless it is built as {model.arch.partition('{')[0]}{{is_decoder=true}}"
            raise InvalidSetting("arch", f"arch: {model.arch} is not causal ({why}); {how}")


def _check_isolation(model: LanguageModel) -> None:
    ids = _tokens(model, 2)
    if (length := ids.shape[1]) < 2:  # no room for two documents
        return
    # Of the second document of each row.
    starts = torch.tensor([max(1, length // 3), min(length // 2 + 1, length - 1)], device=ids.device)
    doc_ids = (torch.arange(length, device=ids.device) >= starts[:, None]).long()
    before = _logits(model, ids, doc_ids)
    after = _logits(model, torch.where(doc_ids == 0, _other_tokens(model, ids), ids), doc_ids)
    for row, start in enumerate(starts.tolist()):
        unpacked = _logits(model, ids[row : row + 1, start:], torch.zeros_like(doc_ids[row : row + 1, start:]))
        for other in (after[row : row + 1, start:], unpacked):
            if _first_change(before[row : row + 1, start:], other) is not None:
                why = f"false with {model.arch}, which lets packed documents see each other"
                raise InvalidSetting("data.isolate_documents", f"data.isolate_documents: expected {why}")


def _draws(model: LanguageModel, ids: Tensor) -> bool:
    """Whether the logits depend on random numbers. How many are drawn may then depend on later tokens, as with dropout
    in experts."""
    return _first_change(_logits(model, ids), _logits(model, ids, seed=1)) is not None


def _logits(model: LanguageModel, ids: Tensor, doc_ids: Tensor | None = None, *, seed: int = 0) -> Tensor:
    seed_all(seed)
    return model.logits(ids, as_documents(doc_ids))


def _tokens(model: LanguageModel, rows: int) -> Tensor:
    length = min(LENGTH, model.context_length or LENGTH)
    numbers = torch.randint(0, 2**31, (rows, length), generator=torch.Generator().manual_seed(length))
    return (numbers % _vocabulary(model)).to(model.device)


def _other_tokens(model: LanguageModel, ids: Tensor) -> Tensor:
    """Tokens that differ from `ids` at every position."""
    return (ids + 1 + ids % 2) % _vocabulary(model)


def _vocabulary(model: LanguageModel) -> int:
    return model.module.config.get_text_config().vocab_size


def _first_change(before: Tensor, after: Tensor) -> int | None:
    """The first position at which logits `[1, T, V]` differ by more than rounding; None if there is none."""
    # Rounding alone makes 5e-7 in float32; the smallest leak that we have seen, with a width of 16, makes 4e-5.
    tolerance = max(1e-5, 4 * torch.finfo(before.dtype).eps)
    before, after = before.float(), after.float()
    changed = ((before - after).abs() > tolerance * before.abs().max()).any(-1).any(0)
    return int(changed.int().argmax()) if changed.any() else None


def seed_all(seed: int) -> None:
    """Seed the generators that a module may draw from: those of torch (on all devices), of Python and of numpy."""
    # `torch.manual_seed` takes half a millisecond: it also notes a call, and who made it, for every kind of device.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _without_dropout(model: LanguageModel) -> Iterator[None]:
    """Within this context dropout modules keep everything. After it, the generators of `seed_all` are as before."""
    parts = [(part, part.p) for part in model.module.modules() if isinstance(part, _DropoutNd)]
    states = random.getstate(), np.random.get_state()
    try:
        for part, _ in parts:
            part.p = 0.0
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        for part, p in parts:
            part.p = p
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _without_zero_weights(module: nn.Module) -> Iterator[None]:
    """Restore buffers after this context. Within it, weights that are all zero get other values: a leak in a branch
    would not show behind a projection of zeros."""
    zeros = [_local(p) for p in module.parameters() if p.ndim > 1 and not _local(p).any()]
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        with torch.no_grad():
            for weight in zeros:
                values = torch.arange(weight.numel(), device=weight.device).float().sin()
                weight.copy_((0.05 * values).view_as(weight))
        yield
    finally:
        with torch.no_grad():
            for weight in zeros:
                weight.zero_()
            for buffer, value in buffers:
                buffer.copy_(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

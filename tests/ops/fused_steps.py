"""A training step of a model, and the number of calls of a fused operation."""

import pytest


def step(model, ids, module, name, **call):
    """The number of calls of `module.name`, the loss and the gradients."""
    calls, operation = [], getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args: calls.append(args) or operation(*args))
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False, **call).loss
        loss.backward()
    return len(calls), [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

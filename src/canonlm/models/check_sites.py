"""Every Canon site of a configuration has a layer, which the code of a mixer or an MLP has to make."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from canonlm.canon.sites import SHORT_CONV, SITES, write
from canonlm.core.errors import expected
from canonlm.models.config import CanonLMConfig, parse_sites

_saved: ContextVar[bool] = ContextVar("saved", default=False)


@contextmanager
def of_saved() -> Iterator[None]:
    """Within this context, models may have sites without a layer, as saved ones of earlier versions do."""
    token = _saved.set(True)
    try:
        yield
    finally:
        _saved.reset(token)


def check_sites(config: CanonLMConfig, model: nn.Module) -> None:
    """InvalidSetting for sites without a layer in a new model. One layer is enough in a hybrid."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    used = dict.fromkeys("".join(map(config.sites, range(config.num_hidden_layers))))
    lacking = [
        slot
        for slot in used
        if not any(re.match(rf"canon{slot}(_|$)" + r"|\w*conv1d$" * (slot == SHORT_CONV), name) for name in names)
    ]
    if not lacking or _saved.get():
        return
    sites = {letter: variant for text in config.canon_texts for letter, variant in parse_sites(text).items()}
    named, kept = config.arch is not None, {x: c for x, c in sites.items() if SITES[x].slot not in lacking}
    example = write({x: c for x, c in kept.items() if SITES[x].forms or not named})
    what = "sites with a layer" + (f", as in {'+canon=' if named else ''}{example}" if example else "")
    key = "arch" if named else "canon_set" if config.canon_sets is None else "canon_sets"
    raise expected(key, f"{what}: no code of this model makes one at {', '.join(lacking)}", getattr(config, key))

"""Names of run folders."""

import re
from collections.abc import Collection
from typing import Any

from canonlm.runs.identity import Config, differences, digest, exact, leaf, write

LONG = 32  # max letters of settings in a name; longer ones become a hash
MAX_LETTERS = 100  # letters of one part of a name: file systems take 255 bytes
SHAPE = {"num_hidden_layers": "L", "hidden_size": "d", "num_attention_heads": "h"}


def slug(text: str) -> str:
    """A file name that is safe on every file system: `text` itself if it is safe, else a name that ends with its
    hash, so that different texts have different names."""
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text[:MAX_LETTERS]).strip(".-")
    return text if safe == text and text else f"{safe}-{digest(text)[:6]}".lstrip("-")


def run_name(task: str, config: Config, usual: Config, swept: Collection[str] = ()) -> str:
    """`depo-llama-lr0.001-seed0`; with settings that differ from the preset's (`usual`):
    `depo-llama-4L256d-steps200-lr0.001-seed0`. Many such settings become a hash; those whose keys are in `swept` then
    follow it: `depo-llama-4L256d-8a7a66-batch_size32-lr0.001-seed0`."""
    changed = {key: value for key, _, value in differences(usual, config)}
    shape = [changed.pop(f"model.{name}", None) for name in SHAPE]
    parts = [slug(task), slug(config["arch"])]
    if any(shape):
        model, heads = config["model"], shape.pop()
        shown = [name for name in SHAPE if name != "num_attention_heads" or heads]
        parts.append("".join(f"{model[name]}{SHAPE[name]}" for name in shown))
    if changed and _clear(changed) is None:
        apart = {key: changed.pop(key) for key in swept if key in changed}
        parts += [_short(some) for some in (changed, apart) if some]
    elif changed:
        parts.append(_short(changed))
    optim = config["train"]["optim"]
    return "-".join([*parts, f"lr{exact(optim['lr'])}", f"seed{config['train']['seed']}"])


def _short(changed: dict[str, Any]) -> str:
    pairs = (f"{key}={write(value)}" for key, value in sorted(changed.items()))
    return _clear(changed) or digest("\n".join(pairs))[:6]


def _clear(changed: dict[str, Any]) -> str | None:
    """The settings themselves, if they are short and a valid name; else None."""
    texts = {key: write(value) for key, value in sorted(changed.items())}
    name = "-".join(f"{leaf(key)}{'' if text[:1].isdigit() else '='}{text}" for key, text in texts.items())
    clear = len(name) <= LONG and slug(name) == name and len({*map(leaf, texts)}) == len(texts)
    return name if clear else None

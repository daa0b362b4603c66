"""Names of run folders."""

import re
from typing import Any

from .identity import Config, differences, digest, leaf, write

LONG = 32  # letters of settings, from which on a hash stands for them
MOST = 100  # letters of one part of a name: file systems take 255 bytes
SHAPE = {"num_hidden_layers": "L", "hidden_size": "d", "num_attention_heads": "h"}


def slug(text: str) -> str:
    """A name that every file system takes. It equals `text` where that is safe already; otherwise it ends with a hash
    of it, so that different texts stay different."""
    safe = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text[:MOST]).strip(".-")
    return text if safe == text and text else f"{safe}-{digest(text)[:6]}".lstrip("-")


def run_name(task: str, config: Config, usual: Config) -> str:
    """`depo-llama-lr0.001-seed0`; where settings differ from the preset's `usual` ones,
    `depo-llama-4L256d-steps200-lr0.001-seed0`. Many settings are a hash of them."""
    changed = {key: here for key, _, here in differences(usual, config)}
    shape = [changed.pop(f"model.{name}", None) for name in SHAPE]
    parts = [slug(task), slug(config["arch"])]
    if any(shape):
        model, heads = config["model"], shape.pop()
        shown = [name for name in SHAPE if name != "num_attention_heads" or heads]
        parts.append("".join(f"{model[name]}{SHAPE[name]}" for name in shown))
    if changed:
        parts.append(_short(changed))
    optim = config["train"]["optim"]
    return "-".join([*parts, f"lr{optim['lr']:g}", f"seed{config['train']['seed']}"])


def _short(changed: dict[str, Any]) -> str:
    texts = {key: write(value) for key, value in sorted(changed.items())}
    said = "-".join(f"{leaf(key)}{'' if text[:1].isdigit() else '='}{text}" for key, text in texts.items())
    clear = len(said) <= LONG and slug(said) == said and len({*map(leaf, texts)}) == len(texts)
    return said if clear else digest("\n".join(f"{key}={text}" for key, text in texts.items()))[:6]

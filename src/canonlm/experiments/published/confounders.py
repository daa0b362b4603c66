"""Differences between published models besides their Canon layers: marks of pairs, and notes for readers."""

from collections.abc import Collection
from functools import cache

from canonlm.experiments.published import differing, seed_scores

NOTES = {
    "¹": "Not Canon alone: in these LlamaCanon models rotary embedding turns a quarter of the dimensions of each head "
    "(16 of 64, 32 of 128), in the Llama models all of them.",
    "²": "Not Canon alone: in this pair, the model with Canon also has another layer norm (zeyuan_layernorm).",
}
"""By the mark of a pair."""
ACROSS = (
    "Between architectures, more differs: the linear models read contexts of 16384 (1B), 12288 (3B) and 4096 "
    "(8B) tokens in batches of 2.1M to 3.1M tokens, the Llama models 4096 in batches of 4.2M to 8.4M, and so take "
    "fewer steps."
)


def notes(marks: Collection[str], several: bool) -> list[str]:
    """The differences between published models that are not due to Canon layers alone. `several`: architectures."""
    lines = [f"{mark} {text}" for mark, text in NOTES.items() if mark in marks]
    lines += [ACROSS] if several else []
    repeats = (
        "One run per learning rate, and runs of one size are not independent trials. Over eight seeds of one model "
        f"of 1.3B, the paper's scores (figure 16) range over {_seeds()} points."
    )
    return [*lines, repeats]


@cache
def _marks() -> dict[str, str]:
    """Model with Canon → the mark of its pair."""
    rows = differing().select("canon_model", "setting").iter_rows()
    return {model: {"rope_dim": "¹", "zeyuan_layernorm": "²"}[setting] for model, setting in rows}


def mark(model: str) -> str:
    """The mark of a model; a row of bests, `…-lr(0.002,0.003)`, has that of its runs."""
    start = model.partition("(")[0] if "(" in model else model
    return next((mark for name, mark in _marks().items() if name.startswith(start)), "")


def _seeds() -> str:
    seeds = {column: seed_scores(column) for column in ("LMB", "BoolQ", "Hella", "1hop-4k")}
    return ", ".join(f"{max(scores) - min(scores):.1f} ({column})" for column, scores in seeds.items())

"""The page of `canonlm results`: the finding, what Canon layers change, every model, curves, compute, synthetic tasks,
settings. Its views (`web`) draw the data of `results_payload` that pass the filters.
"""

from pathlib import Path

from canonlm.core.files import write_text
from canonlm.report.blocks import Block, fold, page
from canonlm.report.results_payload import Shown, model_looks, payload
from canonlm.runs.load import in_short

TITLE = "Published results"
ABOUT = (
    "The 64 language models released with Physics of Language Models, Part 4 (Llama, GLA, Gated DeltaNet and Mamba2 of "
    "1B to 8B parameters, with and without Canon layers), open models beside them, and the tables of the paper (arXiv "
    "2512.17351)."
)
FOLDS = {
    "models": "Every model",
    "curves": "During training",
    "compute": "Against training compute",
    "grids": "Synthetic tasks, cell by cell",
    "settings": "Two runs, setting by setting",
}


def write_results(shown: Shown, out: Path) -> Path:
    """Write the page atomically. OSError: the file cannot be written."""
    write_text(out, render(shown))
    return out


def render(shown: Shown) -> str:
    results = payload(shown)
    left_out = [f"{entry.name}: {entry.reason}" for entry in in_short(shown.left_out)]
    blocks: list[Block] = [
        {"view": "headline"},
        {"note": ABOUT},
        {"view": "bar"},
        {"view": "overview"},
        *(part for view, name in FOLDS.items() for part in fold(name, [{"view": view}], opened=view == "models")),
        *fold(f"What was left out ({len(shown.left_out)})", [{"list": left_out}] if left_out else []),
    ]
    views = ("results", "headline", "bar", "overview", *FOLDS)
    return page(TITLE, [], blocks, model_looks(results["models"]), views=views, results=results)

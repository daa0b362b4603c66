"""Each of the 2,913 cells of the paper's grids has a run of ours beside it, or a reason why that is impossible."""

import shlex
from collections import Counter
from functools import cache

import polars as pl
import pytest

from canonlm.experiments.published import counterpart, grids, table
from canonlm.experiments.published.names import setting_of, split_arch
from canonlm.experiments.published.training import as_in_the_paper
from canonlm.launch.recipes import load_preset
from canonlm.models.build import complete_name
from canonlm.models.interface import Sizes
from canonlm.runs.identity import flat
from canonlm.runs.load import shape_of
from canonlm.runs.rows import slice_key
from canonlm.train.build import build_model
from canonlm.train.config import resolve
from canonlm.train.load_config import merge, override

UNREAD = "how much rotary embedding this column of the figure has could not be read: it is "


@cache
def typed(task, setting, arguments):
    """The configuration of a run that a command starts, with arguments as a user types them."""
    option, name, *overrides = shlex.split(arguments)
    assert option == "--arch"
    raw = merge(load_preset(task, "paper", setting).run, {"arch": name})
    override(raw, overrides)
    return resolve(raw)


@cache
def model_of(arch):
    """(architecture, sites) in a report of a run of that architecture, which stores its complete name."""
    name, fields = complete_name(arch, Sizes(1, 512, 8, vocab_size=50, seq_len=64))
    return split_arch(name, fields)


@cache
def fits(task, setting, size):
    """Whether runs of a difficulty and size have the settings, slices and measures of the paper's cells."""
    run = typed(task, setting, counterpart({"arch": "Llama", "canon": "none", "size": size}).arguments)
    config = run.model_dump(mode="json")
    assert (shape_of(config), setting_of(config["task"])) == (size, setting)
    assert as_in_the_paper(flat(config))
    return {"all", *map(slice_key, run.built_task.slices())}, {"accuracy", *run.built_task.measures}


@pytest.mark.slow
def test_every_cell_has_a_counterpart_or_a_reason():
    cells = grids().to_dicts()
    reasons, models = Counter(), set()
    for cell, note in zip(cells, table("grids")["note"].to_list(), strict=True):
        ours = counterpart(cell)
        assert bool(ours.arch) == (ours.why == "") == (note != "rope unread")
        if ours.why:
            reasons[ours.why] += 1
            assert ours.arguments == ""
            continue
        slices, measures = fits(cell["task"], cell["setting"], cell["size"])
        assert cell["slice"] in slices
        assert cell["metric"] in measures
        assert model_of(ours.arch) == (cell["arch"], cell["canon"]), ours
        run = typed("depo", "depo1-225", ours.arguments)
        assert (run.arch, shape_of(run.model_dump())) == (ours.arch, cell["size"])
        models.add(ours.arguments)
    assert (len(cells), len(models)) == (2913, 123)
    assert reasons == {
        UNREAD + "llama+canon:frozen or llama+canon:frozen+rope=0.5x0.5": 108,
        UNREAD + "llama+canon+mlp=standard or llama+canon+mlp=standard+rope=0.5x0.5": 108,
    }


def test_no_two_models_of_the_paper_have_one_counterpart():
    rows = grids().select("model", "arch", "canon", "size").unique().to_dicts()
    names = [(ours.arch, row["size"]) for row in rows if (ours := counterpart(row)).arch]
    assert len(set(names)) == len(names)


def test_model_sizes_match_the_paper():
    """4 d^2 and 8 d^2 numbers per layer in attention and MLP (arXiv 2512.17351, App. A), without embeddings."""
    grid = grids().filter(pl.col("canon") == "none", pl.col("arch").is_in(["Llama", "Llama+mlp=standard"]))
    for row in grid.select("arch", "canon", "size").unique().to_dicts():
        run = typed("mano", "mano-10", counterpart(row).arguments)
        layers, width = map(int, row["size"].removesuffix("D").split("L"))
        weights = build_model(run, "meta").num_parameters - 2 * len(run.built_task.vocab) * width
        assert abs(weights / (12 * width**2 * layers) - 1) < 0.01

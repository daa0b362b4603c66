"""Modules that are imported when they are first used, as in `later.recipes.find(name)`: torch takes seconds, and help,
completion and most mistakes need none."""

# ruff: noqa: F401

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read by type checkers, and by `__getattr__`
    import torch
    import transformers
    from rich import console, progress

    from canonlm import tasks
    from canonlm.canonize import canonized_model, check, placement
    from canonlm.cli import live, report
    from canonlm.core import errors, limits, saved
    from canonlm.data import answers, dump, prepare
    from canonlm.experiments import claims, ledger, prediction, profile_results, registration, replicate, schema
    from canonlm.experiments import grid as experiment_grid
    from canonlm.experiments import profile as profiles
    from canonlm.launch import grid, local, plan, play, queue, recipes, slurm
    from canonlm.models import build as models_build
    from canonlm.models import hf_small_configs, interface, names, published, saved_model, state
    from canonlm.ops import registry, selftest
    from canonlm.report import card, claims_page, figures, page, prediction_page, profile_page
    from canonlm.report import profile as profile_text
    from canonlm.runs import answers as run_answers
    from canonlm.runs import documents, evaluated
    from canonlm.runs import load as runs_load
    from canonlm.suites import birth_years, generation, load_model, multihop, probe, sampling, task_words, text
    from canonlm.suites import run as suites
    from canonlm.suites.harness import command as harness_command
    from canonlm.suites.harness import run as harness
    from canonlm.train import build, checkpoint, config, load_config, loop, machine, mesh, weights
    from canonlm.train import data as train_data


def __getattr__(name: str) -> Any:
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    globals()[name] = import_module(package + alias.name)
                    return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

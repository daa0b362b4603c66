"""Turns run folders into tables and one HTML page. Needs no torch and no network.

Names are loaded on first use, so that progress in a terminal does not wait for data frames.
"""

from typing import Any

from canonlm.core.extras import import_named

_NAMES = {
    "canonlm.report.page": ("numbers_csv", "render", "write_report"),
    "canonlm.report.play": ("Play", "Section", "load_play"),
    "canonlm.report.table": ("best_table", "rate_table", "tables"),
    "canonlm.runs.load": ("LeftOut", "Run", "load_run", "read_runs"),
    "canonlm.runs.seed_statistics": ("Spread",),
    "canonlm.runs.summary": ("Architecture", "Difference", "Rate", "differences", "fairness", "summarise", "wilson"),
    "canonlm.runs.table": ("read_csv",),
}
_MODULES = {
    "frames": "canonlm.experiments.published.runs",
    "published": "canonlm.experiments.published",
    "tidy": "canonlm.runs.table",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_named(_MODULES[name])
    if module := next((module for module, names in _NAMES.items() if name in names), None):
        return getattr(import_named(module), name)
    raise AttributeError(f"module 'canonlm.report' has no attribute {name!r}")

"""Turns run folders into tables and one HTML page. Needs no torch and no network."""

from ..experiments import published, tidy
from ..runs.load import LeftOut, Run, load_run, read_runs
from ..runs.spread import Spread
from ..runs.summary import Architecture, Difference, Rate, differences, fairness, summarise, wilson
from .numbers import numbers_csv
from .page import render, write_report
from .play import Play, Section, load_play
from .sheet import read_csv
from .table import best_table, rate_table, tables

__all__ = [
    "Architecture", "Difference", "LeftOut", "Play", "Rate", "Run", "Section", "Spread", "best_table", "differences",
    "fairness", "load_play", "load_run", "numbers_csv", "published", "rate_table", "read_csv", "read_runs", "render",
    "summarise", "tables", "tidy", "wilson", "write_report",
]  # fmt: skip

"""Turns run folders into tables and one HTML page. Needs no torch and no network."""

from canonlm.experiments import published, tidy
from canonlm.report.numbers import numbers_csv
from canonlm.report.page import render, write_report
from canonlm.report.play import Play, Section, load_play
from canonlm.report.sheet import read_csv
from canonlm.report.table import best_table, rate_table, tables
from canonlm.runs.load import LeftOut, Run, load_run, read_runs
from canonlm.runs.seed_statistics import Spread
from canonlm.runs.summary import Architecture, Difference, Rate, differences, fairness, summarise, wilson

__all__ = [
    "Architecture", "Difference", "LeftOut", "Play", "Rate", "Run", "Section", "Spread", "best_table", "differences",
    "fairness", "load_play", "load_run", "numbers_csv", "published", "rate_table", "read_csv", "read_runs", "render",
    "summarise", "tables", "tidy", "wilson", "write_report",
]  # fmt: skip

"""Babilong: bAbI's questions about small facts that are scattered in a long text (arXiv 2406.10149)."""

from canonlm.suites.babilong.task import Babilong, BabilongSettings, published_settings

__all__ = ["Babilong", "BabilongSettings", "published_settings"]

"""Checkpoints of the original Canon release, read into our decoder and written back.

A format is a configuration and names. The configuration is a class with the fields of theirs, which knows ours; the
names are tables that say which rows of a tensor of theirs are which tensor of ours. The release fuses what we keep
apart (one Canon over [q, k, v], one matrix for [gate, up]) and may rotate neighbouring channels where we rotate
halves; both are rearrangements of rows, so the same tables serve reading and writing.
"""

from canonlm.models.published.checkpoint import build, export, to_llama
from canonlm.models.published.files import TARGETS, load_published, save_published

__all__ = ["TARGETS", "build", "export", "load_published", "save_published", "to_llama"]

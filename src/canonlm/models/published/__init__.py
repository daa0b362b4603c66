"""Checkpoints of the original Canon release, read into our decoder and written back.

A format is a configuration and names. The configuration is a class with the release's fields, which converts from and
to ours; the names are tables that map rows of the release's tensors to our tensors. The release fuses what we keep
separate (one Canon over [q, k, v], one matrix for [gate, up]) and may rotate neighbouring channels where we rotate
halves; both are rearrangements of rows, so the same tables serve reading and writing.
"""

from canonlm.models.published.checkpoint import build, export, to_llama
from canonlm.models.published.files import TARGETS, load_published, save_published

__all__ = ["TARGETS", "build", "export", "load_published", "save_published", "to_llama"]

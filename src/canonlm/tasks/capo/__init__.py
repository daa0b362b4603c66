"""Capo: people, their biographies as tokens, and the bits that a model knows about them."""

from canonlm.tasks.capo.task import Capo

__all__ = ["Capo"]

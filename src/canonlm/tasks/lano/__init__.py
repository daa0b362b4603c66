"""Lano: sentences of a layered context-free grammar; the grammars, their exact distributions, and the task."""

from canonlm.tasks.lano.grammar import BUILT_IN, RELEASED, Grammar
from canonlm.tasks.lano.sampling import Derivation
from canonlm.tasks.lano.task import Lano

__all__ = ["BUILT_IN", "RELEASED", "Derivation", "Grammar", "Lano"]

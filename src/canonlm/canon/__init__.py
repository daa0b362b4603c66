"""Canon layers: the layer itself, its variants, and the names of its sites."""

from canonlm.canon.layer import CanonLayer

__all__ = ["CanonLayer"]

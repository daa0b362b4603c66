"""Canon layers: the layer itself, its variants, and the names of the places that it goes to."""

from canonlm.canon.layer import CanonLayer

__all__ = ["CanonLayer"]

"""Canon layers: the layer itself, and the names of the places that it goes to."""

from canonlm.canon.layer import CanonLayer

__all__ = ["CanonLayer"]

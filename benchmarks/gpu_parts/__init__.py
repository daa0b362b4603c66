"""The groups of `benchmarks/gpu.py`, a file for each kind. A group yields rows; the door writes them down."""

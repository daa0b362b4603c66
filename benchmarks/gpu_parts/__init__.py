"""The groups of `benchmarks/gpu.py`, a file for each kind. A group yields rows, which `gpu.py` writes to a file."""

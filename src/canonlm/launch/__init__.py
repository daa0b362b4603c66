"""Grids of runs: `play` lays one out, `local` runs it on this machine."""

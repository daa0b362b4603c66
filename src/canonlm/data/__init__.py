"""Samples in files (`dump`, `answers`), and prepared text: its index, its shards, the windows that training reads."""

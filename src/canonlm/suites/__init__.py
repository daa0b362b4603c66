"""Evaluation suites: questions for any model that can be opened. Each is asked once, and the answer is stored."""

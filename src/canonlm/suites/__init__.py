"""Evaluation suites: questions to any model that can be opened, each asked once; the answers are stored."""

"""Judging models: the tasks' graders on what a model writes."""

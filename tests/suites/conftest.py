"""A small Llama, and the harness's index of tasks without its own, for the tests of the lm-evaluation-harness."""

import pytest


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    from tiny_models import save_llama

    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return str(folder)


@pytest.fixture
def _local_tasks_only(monkeypatch):
    """Reading the harness's thousands of files takes seconds."""
    import lm_eval.tasks

    TaskManager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda **settings: TaskManager(include_defaults=False, **settings)
    )

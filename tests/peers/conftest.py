"""transformers' own model tests, from its source distribution, and the outcomes that we expect (`make test-peers`).

The library's tests are fetched into `.venv/peers` and imported as the package `transformers_tests`. They are collected
with `-m peers` only, so other sessions do not need them.

`expected.yaml` lists the tests that are skipped or fail, and why. All other tests must pass. A listed failure that
passes is a failure, and so is a listed skip that runs.
"""

import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest
import yaml

HERE = Path(__file__).parent
FETCHED = HERE.parents[1] / ".venv" / "peers"
ABSENT = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {"return_dict": False, "output_hidden_states": True, "dtype": "float16",
                                 "chunk_size_feed_forward": 5, "id2label": {0: "label"}, "problem_type": "regression"},
    },
}  # fmt: skip
"""Imports of the library's test modules from folders that its source distribution lacks. The mixins are empty, so their
tests do not run here; the arguments of a configuration are some that every configuration takes."""


EXPECTED = pytest.StashKey[list]()


@dataclass(frozen=True)
class Entry:
    """An entry of `expected.yaml`: tests (names with * and ?) that end as `outcome` for these models, with a message
    that contains `message`."""

    tests: tuple[str, ...]
    models: tuple[str, ...]
    outcome: str
    message: str
    reason: str

    def matches(self, test: str, model: str) -> bool:
        return model in self.models and any(fnmatchcase(test, pattern) for pattern in self.tests)


def read_expected() -> list[Entry]:
    groups = yaml.safe_load((HERE / "expected.yaml").read_text())
    models = groups.pop("models")
    groups = {outcome: groups[outcome] for outcome in ("failed", "skipped")}  # the others name groups of models
    return [
        Entry(tuple(entry["tests"]), tuple(entry.get("models", models)), outcome, entry["message"], entry["reason"])
        for outcome, entries in groups.items()
        for entry in entries
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.suffix == ".py" and config.option.markexpr != "peers" else None


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: of transformers")
    config.addinivalue_line("markers", "is_training_test: of transformers")
    if config.option.markexpr == "peers":
        _register()
        config.stash[EXPECTED] = read_expected()


def _register() -> None:
    """Make the library's tests importable under a name other than `tests`."""
    if not (FETCHED / "tests").is_dir():
        raise pytest.UsageError(f"{FETCHED} is missing: use `make test-peers`, which fetches it")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "RUN_SLOW": "1"}
    _module("transformers_tests", [str(FETCHED / "tests")])
    for name, content in ABSENT.items():
        _module(f"transformers_tests.{name.partition('.')[0]}", [])
        vars(_module(f"transformers_tests.{name}")).update(content)


def _module(name: str, path: list[str] | None = None) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    if path is not None:
        module.__path__ = path
    return module


SEEN = pytest.StashKey[set]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Report expected failures and skips as such, and all others as failures. It is also called for every part of a
    test (`subTest`): where a failure or a skip is expected, some parts may pass, but not all."""
    report = yield
    model = getattr(getattr(item, "cls", None), "peer", None)
    if model is None:
        return report
    matching = [entry for entry in item.config.stash[EXPECTED] if entry.matches(item.name, model)]
    seen = item.stash.setdefault(SEEN, set())
    problem = ""
    if len(matching) > 1:
        problem = f"expected.yaml has {len(matching)} entries for it"
    elif report.when != "teardown" and not report.passed:
        message = str(call.excinfo.value) if call.excinfo else ""
        problem = _problem(report.outcome, message, matching[0] if matching else None)
        seen.add(report.outcome)
    elif report.when == "teardown" and matching and matching[0].outcome not in seen:
        problem = f"expected.yaml says: {matching[0].outcome} ({matching[0].reason}). It did not."
    if problem:
        report.longrepr = f"{problem}\n\n{report.longreprtext}"
        report.outcome = "failed"
    elif report.failed and matching:
        report.outcome, report.wasxfail = "skipped", matching[0].reason
    return report


def _problem(outcome: str, message: str, entry: Entry | None) -> str:
    """Why a failure or a skip is not the expected one; "" if it is."""
    if entry is None:
        return "" if outcome == "failed" else f"expected.yaml does not list it, and it was skipped: {message}"
    if outcome != entry.outcome:
        return f"expected.yaml says: {entry.outcome} ({entry.reason}). It was: {outcome}, {message}"
    if entry.message not in message:
        return f"expected.yaml says that the message contains {entry.message!r}, got: {message[:500]}"
    return ""


@pytest.fixture
def expected_entries(request: pytest.FixtureRequest) -> list[Entry]:
    return request.config.stash[EXPECTED]

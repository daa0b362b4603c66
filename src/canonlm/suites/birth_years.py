"""The questions that `canonlm play text` asks trained models: birth years that a short text states directly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canonlm.train.config import RunConfig

QUESTIONS = 200
PEOPLE = 2  # with their facts and the question, about 150 bytes


def ask(folder: Path, run: RunConfig) -> None:
    """Evaluate a finished run on the questions, and write the results to its folder, as `canonlm eval` does; existing
    answers are used. ValueError: its windows are too short for the questions."""
    from canonlm.suites import run as suites
    from canonlm.suites.load_model import open_model

    lengths = [0] if run.data.seq_len < 512 else [0, run.data.seq_len // 4]
    settings = suites.plan("multihop", [], people=PEOPLE, n=QUESTIONS, background=lengths)
    subject = open_model(str(folder), device=run.train.device, trust_remote_code=True)  # the user named it
    out = folder / "evals" / f"step-{run.train.steps:08d}"
    suites.run("multihop", settings, subject, suites.PromptOptions(), out, _Silent())


class _Silent:
    def begin(self, name: str, questions: int | None) -> None: ...

    def advance(self, answered: int) -> None: ...

    def end(self, entry: Mapping[str, Any], again: bool) -> None: ...

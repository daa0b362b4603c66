"""The retrieval tasks of the harness with their text told twice: a model that reads from left to right knows at the
second time what it is asked for (arXiv 2407.05483)."""

from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.fda.task import FDA
from lm_eval.tasks.squad_completion.task import SQUADCompletion
from lm_eval.tasks.swde.task import SWDE

BETWEEN = "\n\n"


class Twice(ConfigurableTask):
    """The task whose YAML in the harness `metadata: {twice: drop/default.yaml}` names. Its `doc_to_text` is a
    template."""

    def __init__(self, config: dict[str, Any]) -> None:
        stock = load_yaml(Path(lm_eval.tasks.__file__).parent / config["metadata"]["twice"])
        stock = {key: value for key, value in stock.items() if key not in ("tag", "group")}
        told = stock["doc_to_text"]
        changes = {
            "task": config["task"],
            "doc_to_text": f"{told}{BETWEEN}{told}",
            "metadata": {**stock["metadata"], **config["metadata"]},
        }
        super().__init__(config={**stock, **changes})


class FDATwice(FDA):
    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return BETWEEN.join([super().doc_to_text(doc)] * 2)


class SWDETwice(SWDE):
    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return BETWEEN.join([super().doc_to_text(doc)] * 2)


class SQUADTwice(SQUADCompletion):
    def doc_to_text(self, doc: dict[str, Any]) -> str:
        return BETWEEN.join([super().doc_to_text(doc)] * 2)

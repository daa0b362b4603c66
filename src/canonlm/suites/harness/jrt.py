"""The harness's retrieval tasks with their text repeated: the second time, a model that reads from left to right has
already seen the question (arXiv 2407.05483)."""

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
    """The task of the harness's YAML file in `metadata: {twice: drop/default.yaml}`, with a template `doc_to_text`."""

    def __init__(self, config: dict[str, Any]) -> None:
        stock = load_yaml(Path(lm_eval.tasks.__file__).parent / config["metadata"]["twice"])
        stock = {key: value for key, value in stock.items() if key not in ("tag", "group")}
        text = stock["doc_to_text"]
        changes = {
            "task": config["task"],
            "doc_to_text": f"{text}{BETWEEN}{text}",
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

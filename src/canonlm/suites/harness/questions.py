"""Our retrieval suites as tasks of the harness, for any of its models.

The YAML of a task names one of these classes and, as `metadata`, settings of the suite. `--metadata` of the harness
changes them (`'{"n": 100, "seed": 1}'`), and names the tokenizer by which lengths are measured: `tokenizer`, or else
the `pretrained` or `model` among the model's arguments.
"""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.ruler import common_utils
from pydantic import BaseModel

from canonlm.core.errors import expected, panics_raised
from canonlm.core.untrusted import check_tokenizer
from canonlm.suites.babilong import Babilong, BabilongSettings
from canonlm.suites.multihop import MultiHop, MultiHopSettings
from canonlm.suites.questions import Question, Tokens


class QuestionsTask(ConfigurableTask):
    """A retrieval suite's questions and grading as a task of the harness."""

    VERSION = 1
    suite: ClassVar[Any]
    settings: ClassVar[type[BaseModel]]

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = config["metadata"]
        chosen = {key: value for key, value in metadata.items() if key in self.settings.model_fields}
        self.questions = self.suite(self.settings(**chosen), tokens_of(metadata))
        super().__init__(
            config={
                "task": config["task"],
                "output_type": "generate_until",
                "test_split": "test",
                "doc_to_text": "prompt",
                "doc_to_target": "answer",
                "num_fewshot": 0,
                "generation_kwargs": {
                    "until": list(self.questions.stop),
                    "max_gen_toks": self.questions.max_new_tokens,
                    "do_sample": False,
                },
                "process_results": self.graded,
                "metric_list": [
                    {"metric": measure, "aggregation": "mean", "higher_is_better": True}
                    for measure in self.questions.measures
                ],
                "metadata": {"version": self.VERSION, **metadata},
            }
        )

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        questions = (self.questions[index] for index in range(len(self.questions)))
        self.dataset = {"test": Dataset.from_list([{"prompt": q.prompt, "answer": q.answer} for q in questions])}

    def graded(self, doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        right = self.questions.grade(Question(doc["prompt"], doc["answer"]), results[0])
        return {measure: float(value) for measure, value in right.items()}


class MultiHopTask(QuestionsTask):
    suite, settings = MultiHop, MultiHopSettings


class BabilongTask(QuestionsTask):
    suite, settings = Babilong, BabilongSettings


def tokens_of(metadata: dict[str, Any]) -> Tokens:
    """Counts tokens with the tokenizer named in the metadata, which is opened when it is first needed."""
    name = next((name for key in ("tokenizer", "pretrained", "model") if (name := metadata.get(key))), None)

    @cache
    def tokenizer() -> Any:
        if name is None:
            what = 'a tokenizer to measure lengths by, such as \'{"tokenizer": "gpt2"}\''
            raise expected("--metadata", what, None)
        return _tokenizer(str(name), bool(metadata.get("trust_remote_code")))

    def count(text: str) -> int:
        with panics_raised(name):
            return len(tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"])

    return count


def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (Path(name) / "config.yaml").is_file():  # a run of ours
        from canonlm.suites.load_model import tokenizer_of_run

        if (file := tokenizer_of_run(Path(name))) is None:
            raise expected("--metadata", "a tokenizer to measure lengths by, as the run was not trained on text", name)
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    try:
        if Path(name).is_dir():
            check_tokenizer(Path(name))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        what = f"a tokenizer to measure lengths by ({' '.join(str(error).split())})"
        raise expected("--metadata", what, name) from None


def grade_needle(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score of a needle for its own length alone: the harness gives -1 for every other length, which has no
    mean or standard error."""
    length = str(doc["max_length"])
    return {length: common_utils.process_results(doc, results)[length]}

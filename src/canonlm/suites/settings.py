"""The settings of each suite and their defaults. Pages of results read them, so nothing here loads torch."""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from canonlm.train.config import Settings


class PromptOptions(NamedTuple):
    """How prompts go to a model, in every suite."""

    batch_size: int | None = None  # None: found automatically
    bos: bool = False  # whether a prompt begins with the tokenizer's BOS token
    beyond: bool = False  # whether prompts may be longer than the model's context


class TextSettings(Settings):
    """The settings of `canonlm eval --suite text`."""

    file: str  # JSON lines, or one document in a file that ends in .txt
    text_key: str = "text"
    n: PositiveInt | None = None  # the first documents
    context: int | None = Field(None, ge=2)  # tokens of a window; default: the model's, at most 2048

    @property
    def name(self) -> str:
        return f"text-{Path(self.file).stem}"


class PlaygroundSettings(Settings):
    """The settings of `canonlm eval --suite playground`. `task` changes single settings of the task that the run was
    trained on; for a model that is not a run of ours, it must contain all of them."""

    task: dict[str, Any] = {}
    lengths: list[float] = Field([1], min_length=1)  # of windows, in training lengths
    n: PositiveInt = 500  # windows, instances, sentences or people, by task
    seed: NonNegativeInt | None = None  # default: the run's
    split: str = "test"


class HarnessSettings(BaseModel):
    """Settings of `canonlm eval --suite harness`.

    tasks: names of tasks, groups, tags, patterns of names, or YAML files.
    num_fewshot: examples before each question; default: the task's own number.
    limit: questions of each task, the first ones; default: all.
    include: a folder with the YAML files of your tasks.
    max_length: tokens that the model reads at once; default: its context.
    metadata: for tasks that make their own data, such as `{"max_seq_lengths": [1024]}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: list[str] = Field(min_length=1)
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveInt | None = None
    include: str | None = None
    max_length: int | None = Field(None, ge=2)
    metadata: dict[str, Any] = {}


_CLASSES: dict[str, type[BaseModel]] = {
    "text": TextSettings,
    "playground": PlaygroundSettings,
    "harness": HarnessSettings,
}
RETRIEVAL = {"multihop": "MultiHop", "babilong": "Babilong"}
"""The classes of questions in words, each in the module of its suite, with the settings and the published ones."""


def settings_class(suite: str) -> type[BaseModel]:
    """The class of a suite's settings. KeyError: no such suite."""
    if suite in RETRIEVAL:
        return getattr(import_module(f"canonlm.suites.{suite}"), f"{RETRIEVAL[suite]}Settings")
    return _CLASSES[suite]


def published_settings(suite: str) -> list[BaseModel]:
    """The settings behind the published results; none for a suite without settings of its own for them."""
    if suite not in RETRIEVAL:
        return []
    return import_module(f"canonlm.suites.{suite}").published_settings()


def defaults(suite: str) -> dict[str, Any]:
    """The default of each setting that has one, and of the options for prompts. {} for an unknown suite."""
    if suite not in RETRIEVAL and suite not in _CLASSES:
        return {}
    fields = settings_class(suite).model_fields.items()
    known = {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}
    return known | PromptOptions()._asdict()

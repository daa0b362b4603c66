"""The suite: stories of bAbI's tasks qa1 to qa5, padded to a length with other sentences around their facts.

The story, the question and how far into the other sentences each fact stands are a function of (task, split, seed,
index); they do not depend on tokenizer, length or text. The other sentences are the beginning of one stream.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from canonlm.core.errors import InvalidSetting, expected
from canonlm.suites.babilong import facts, world
from canonlm.suites.babilong.prompts import prompt, question_of
from canonlm.suites.babilong.scoring import TAGS, right
from canonlm.suites.babilong.world import LABELS, Story
from canonlm.suites.background import fill, open_background, scatter
from canonlm.suites.questions import Question, Tokens
from canonlm.tasks.random import check_split
from canonlm.tasks.spec import Settings

PUBLISHED_LENGTHS = (0, 1000, 2000, 4000)  # tokens
PUBLISHED_QUESTIONS = 1000  # the number in the published dataset
LATER = 4  # in the slice `later`: this number of later facts, or more


class BabilongSettings(Settings):
    """One setting of the suite."""

    task: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1"
    length: NonNegativeInt = 0  # tokens of the whole prompt, by the evaluated model's tokenizer; 0: the facts alone
    facts: str = "simulator"  # or hub: the public dataset; or a folder with its files
    text: str | None = None  # a text file for the other sentences; None: generated; dataset: as the dataset has them
    n: PositiveInt = 500  # questions; of a dataset with fewer, all
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> "BabilongSettings":
        if self.text == "dataset":
            if self.facts == "simulator":
                raise expected("facts", "hub or a folder, for text=dataset", self.facts)
            if self.length % 1000:
                raise expected("length", "a multiple of 1000, for text=dataset", self.length)
        return self

    @property
    def name(self) -> str:
        """`babilong-qa1-2k`: the task, and the length in thousands of tokens."""
        return f"babilong-{self.task}-{self.length / 1000:.10g}k"


def published_settings(**settings: Any) -> list[BabilongSettings]:
    """The published grid: five tasks, each in four lengths, of the public dataset's own contexts. `settings`: `facts`
    (a folder with a copy of it, say), `text`, `n`, `seed`."""
    settings = {"facts": "hub", "text": "dataset", "n": PUBLISHED_QUESTIONS, **settings}
    return [
        BabilongSettings(**{"task": task, "length": length, **settings})
        for task in world.TASKS
        for length in PUBLISHED_LENGTHS
    ]


class Babilong:
    """The questions of one setting, a `canonlm.suites.questions.Questions`.

    Slices of simulated stories, whose needed facts are known: the `quarter` of the text (1 to 4) in which the last
    needed fact stands, and the number of facts that come `later`, where 4 stands for 4 or more.
    """

    measures: ClassVar[tuple[str, ...]] = ("correct",)
    max_new_tokens = 48  # enough to name the answer in a sentence as in the examples, byte by byte
    stop: Sequence[str] = (".", *TAGS)  # what comes after them does not count

    def __init__(self, settings: BabilongSettings, tokens: Tokens, split: str = "test") -> None:
        """tokens: counts the tokens of a text, without special tokens. split: that of the simulator's stories.

        ValueError: facts or a text that cannot be read.
        """
        check_split(split)
        self.settings, self.split, self.name = settings, split, settings.name
        self._tokens = tokens
        self._padded = settings.text == "dataset"
        self._background = open_background(None if self._padded else settings.text)
        self._stories: list[Story] | None = None
        self.labels: frozenset[str] = frozenset(LABELS[settings.task])  # all answers that the task's questions have
        if settings.facts != "simulator":
            config = f"{settings.length // 1000}k" if self._padded else "0k"
            self._stories = facts.read(settings.facts, settings.task, config, self._padded)
            self.labels = frozenset(story.answer.lower() for story in self._stories)
        self._sentences: dict[int, int] = {}  # of a question's background, so that its tokens are counted once

    def __len__(self) -> int:
        return self.settings.n if self._stories is None else min(self.settings.n, len(self._stories))

    def __getitem__(self, index: int) -> Question:
        index = range(len(self))[index]
        story = self.story(index)
        slots = self._rng("slots", index)
        places = sorted(slots.random() for _ in story.facts)
        sentences, where = scatter(story.facts, places, self._filling(index, story, places))
        return Question(
            prompt(self.settings.task, sentences, story.question),
            story.answer,
            _slice(story, where, len(sentences)),
        )

    def story(self, index: int) -> Story:
        """Question `index` without other sentences."""
        if self._stories is None:
            return world.story(self.split, self.settings.seed, self.settings.task, index)
        return self._stories[index]

    def grade(self, question: Question, answer: str) -> dict[str, bool]:
        """Whether an answer is right by the rule of `scoring`. Only prompt and answer of `question` are used."""
        return {"correct": right(answer, question.answer, question_of(question.prompt), self.labels)}

    def _filling(self, index: int, story: Story, places: Sequence[float]) -> list[str]:
        """The longest beginning of the background with which the prompt has at most `length` tokens."""
        task, length = self.settings.task, self.settings.length
        if self._padded or not length:
            return []
        stream = self._background.sentences(self._rng("background").getrandbits(63), index)
        if index in self._sentences:
            return [next(stream) for _ in range(self._sentences[index])]

        def total(filling: Sequence[str]) -> int:
            return self._tokens(prompt(task, scatter(story.facts, places, filling)[0], story.question))

        # A sentence counts as the tokens that it adds after another: the space before it may be a token.
        full_stop = self._tokens(".")
        try:
            filling = fill(stream, length - total([]), lambda sentence: self._tokens(f". {sentence}") - full_stop)
        except InvalidSetting as error:
            raise expected(
                "text", f"a text file long enough for length={length} ({error})", self.settings.text
            ) from None
        while filling and total(filling) > length:
            filling.pop()
        self._sentences[index] = len(filling)
        return filling

    def _rng(self, *what: object) -> random.Random:
        return random.Random(
            " ".join(map(str, ("babilong", self.split, self.settings.seed, self.settings.task, *what)))
        )


def _slice(story: Story, where: Sequence[int], sentences: int) -> dict[str, int]:
    if not story.support:
        return {}
    last = story.support[-1]
    return {
        "quarter": int(4 * (where[last] + 0.5) / sentences) + 1,
        "later": min(LATER, len(story.facts) - 1 - last),
    }

"""Birth-year multi-hop: who was born in which year, said directly or through others, in a long text about other things.

k groups of N people. The birth years of the first group are told, N different ones; each later group is matched to the
one before it by a random permutation, and of each person it is told that he or she was born in the same year as the
matched one. Asked for is the birth year of a person of the last group: one fact to find for k = 1, a chain of k facts
otherwise. The law is that of arXiv 2512.17351, Part 4.1; names are made from Capo's pools, the words are ours.

The people, their years, the order of the facts, their places and the question are a function of (k, people, published,
split, seed, index). The background is not part of it: with another length, text or tokenizer the same is asked.
"""

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from canonlm.errors import expected, writing
from canonlm.suites.background import fill, open_background, scatter
from canonlm.suites.questions import Question, Tokens
from canonlm.tasks.capo.people import check_people
from canonlm.tasks.capo.pools import Pools, load
from canonlm.tasks.random import check_split
from canonlm.tasks.spec import Settings

YEARS = range(1950, 2010)
PUBLISHED_BACKGROUNDS = (0, 500, 1000, 2000, 3000, 4000, 5000, 6000)  # tokens

DIRECT = "{name} was born in {year}."
LINK = "{name} was born in the same year as {other}."
BEGINNING = "The birth year of {name} is"
INSTRUCTION = (
    "Read the text between the tags. It tells the birth years of some people directly; of others it only tells with "
    "whom they share their birth year, so that several sentences may have to be combined. Then complete the last "
    "sentence with a year of four digits."
)


class MultiHopSettings(Settings):
    """One setting of the suite."""

    k: PositiveInt = 1  # hops: facts that an answer takes
    people: int = Field(5, ge=1, le=len(YEARS))  # N, in each of the k groups
    background: NonNegativeInt = 0  # M tokens, by the evaluated model's tokenizer
    text: str | None = None  # a text file for the background; None: generated sentences
    published: bool = False  # as in the paper: facts in order, always the first person of the last group
    n: PositiveInt = 500  # questions
    seed: NonNegativeInt = 0

    @property
    def name(self) -> str:
        """`2hop-0.5k`: k, and the background in thousands of tokens."""
        return f"{self.k}hop-{self.background / 1000:.10g}k"


def published_settings(**settings: Any) -> list[MultiHopSettings]:
    """The published grid: five people and one hop, three people and two hops, each with eight lengths of background.
    `settings`: `text`, `n`, `seed`."""
    return [
        MultiHopSettings(k=k, people=people, background=background, published=True, **settings)
        for k, people in ((1, 5), (2, 3))
        for background in PUBLISHED_BACKGROUNDS
    ]


@dataclass(frozen=True)
class Story:
    """What is told and asked, without the background.

    facts: the sentences in the order of the text. places: for each fact, in [0, 1) and rising, how far into the
    background it stands. chain: where in `facts` those are that the answer takes, the direct one first.
    """

    facts: tuple[str, ...]
    places: tuple[float, ...]
    chain: tuple[int, ...]
    asked: str
    answer: str
    others: tuple[tuple[str, str], ...]  # (name, year) of those in the last group who are not asked about


class MultiHop:
    """The questions of one setting, as `canonlm.suites.questions.Questions` wants them.

    Slices: `position` of the direct fact among all facts, from 1; with a background, the `quarter` of the text (1 to 4)
    in which it stands; for k > 1, unless `published`, the position of the fact about the person `asked` for, and how
    many links of the chain are told `backward`: before the fact that they lead to.
    """

    # "exact": what was written begins, after blanks, with the year, and no digit follows. "year": the first number of
    # exactly four digits in it is the year.
    measures: ClassVar[tuple[str, ...]] = ("exact", "year")
    most = 16  # enough for a few words before the year, and for tokenizers that cut it into digits
    stop: Sequence[str] = (".",)

    def __init__(self, settings: MultiHopSettings, tokens: Tokens, split: str = "test") -> None:
        """tokens: of a text, without special ones. ValueError for a text that is none, and for too many people."""
        check_split(split)
        self.settings, self.split, self.name = settings, split, settings.name
        self._tokens, self._background = tokens, open_background(settings.text)
        self._lengths: dict[int, int] = {}  # sentences of a background, so that its tokens are counted once
        # Backgrounds know no splits, and other suites use them too: here they are called with a seed of their own.
        self._background_seed = random.Random(f"multihop {split} {settings.seed} background").getrandbits(63)
        check_people("people", settings.k * settings.people, _pools().sizes)

    def __len__(self) -> int:
        return self.settings.n

    def __getitem__(self, index: int) -> Question:
        index = range(len(self))[index]
        story = self.story(index)
        background = self._sentences(index)
        text = " ".join(scatter(story.facts, story.places, background)[0])
        beginning = BEGINNING.format(name=story.asked)
        if self.settings.k == 1:
            prompt = f"{text}\n\n{beginning}"
        else:
            prompt = f"{INSTRUCTION}\n\n<context>\n{text}\n</context>\n\n{beginning}"
        return Question(prompt, story.answer, self._slice(story))

    def story(self, index: int) -> Story:
        """What question `index` tells and asks."""
        k, n, published = self.settings.k, self.settings.people, self.settings.published
        rng = random.Random(f"multihop {self.split} {self.settings.seed} {index}")
        names = [_name(number) for number in rng.sample(range(prod(_pools().sizes[:3])), k * n)]
        years = rng.sample(YEARS, n)
        facts = [DIRECT.format(name=name, year=year) for name, year in zip(names, years, strict=False)]
        told_by = list(range(n))  # person → the person of the group before, in numbers of `names` and of `facts`
        for first in range(n, k * n, n):
            matched = rng.sample(range(first - n, first), n)
            told_by += matched
            pairs = zip(names[first : first + n], matched, strict=True)
            facts += [LINK.format(name=name, other=names[other]) for name, other in pairs]
        asked = (k - 1) * n + (0 if published else rng.randrange(n))
        order = list(range(k * n)) if published else rng.sample(range(k * n), k * n)
        needed = _chain(asked, n, told_by)
        return Story(
            facts=tuple(facts[fact] for fact in order),
            places=tuple(sorted(rng.random() for _ in facts)),
            chain=tuple(map(order.index, needed)),
            asked=names[asked],
            answer=str(years[needed[0]]),
            others=tuple(
                (names[other], str(years[_chain(other, n, told_by)[0]]))
                for other in range((k - 1) * n, k * n)
                if other != asked
            ),
        )

    def grade(self, question: Question, said: str) -> dict[str, bool]:
        """By the two measures. Only what was written counts, however it goes on."""
        found = re.search(r"(?<![0-9])[0-9]{4}(?![0-9])", said)
        return {
            "exact": re.match(f"{question.answer}(?![0-9])", said.strip()) is not None,
            "year": found is not None and found[0] == question.answer,
        }

    def _sentences(self, index: int) -> list[str]:
        sentences = self._background.sentences(self._background_seed, index)
        if index in self._lengths:
            return [next(sentences) for _ in range(self._lengths[index])]
        filled = fill(sentences, self.settings.background, self._tokens)
        self._lengths[index] = len(filled)
        return filled

    def _slice(self, story: Story) -> dict[str, int]:
        found = {"position": story.chain[0] + 1}
        if self.settings.background:
            found["quarter"] = int(4 * story.places[story.chain[0]]) + 1
        if self.settings.k > 1 and not self.settings.published:
            links = zip(story.chain, story.chain[1:], strict=False)
            found |= {"asked": story.chain[-1] + 1, "backward": sum(later < earlier for earlier, later in links)}
        return found


def _chain(person: int, n: int, told_by: Sequence[int]) -> list[int]:
    """The people over whom the year of `person` is found, from the one of whom it is told."""
    chain = [person]
    while chain[0] >= n:
        chain.insert(0, told_by[chain[0]])
    return chain


def write_texts(questions: MultiHop, out: Path, on_progress: Callable[[int], None] = lambda done: None) -> None:
    """Write texts to train on as lines `{"text": …}`, which `canonlm data prepare` reads: every prompt with its answer,
    after which the others of the last group are asked about, too. (Few tokens of such a text can be known, and these
    are what a model learns from.)

    `out` is whole or not there. ValueError: it is there already, is not named .jsonl, or cannot be written.
    """
    if out.suffix != ".jsonl":
        raise expected("OUT", "a name that ends in .jsonl", str(out))
    if out.exists():
        raise expected("OUT", "a file that does not exist yet", str(out))
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        with writing("OUT", out, "file"), temporary.open("w", encoding="utf-8") as file:
            for index in range(len(questions)):
                question = questions[index]
                more = "".join(
                    f" {BEGINNING.format(name=name)} {year}." for name, year in questions.story(index).others
                )
                text = f"{question.prompt} {question.answer}.{more}"
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                on_progress(index + 1)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _pools() -> Pools:
    return load()


def _name(number: int) -> str:
    """Full name `number` of all combinations."""
    pools = _pools()
    number, last = divmod(number, len(pools.last))
    first, middle = divmod(number, len(pools.middle))
    return f"{pools.first[first]} {pools.middle[middle]} {pools.last[last]}"

"""Birth-year multi-hop: birth years, stated directly or through other people, in a long text about other things.

k groups of N people. The text states the birth years of the first group, N different ones. Each later group is matched
to the one before it by a random permutation, and the text says of each person that he or she was born in the same year
as the matched one. The question is about a person of the last group: it takes one fact for k = 1, else a chain of k
facts. The distribution is that of arXiv 2512.17351, Part 4.1; names are made from Capo's pools, the words are ours.

The people, their years, the order of the facts, their places and the question are a function of (k, people, published,
split, seed, index). They do not depend on the background's length or text, nor on the tokenizer.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from canonlm.core.errors import expected, writing
from canonlm.core.files import complete_file
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

    k: PositiveInt = 1  # hops: facts that an answer needs
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
    """The facts and the question, without the background.

    facts: the sentences in the order of the text. places: for each fact, how far into the background it stands, in
    [0, 1) and ascending. chain: the indices of the facts that the answer needs, the direct one first. person: the name
    in the question.
    """

    facts: tuple[str, ...]
    places: tuple[float, ...]
    chain: tuple[int, ...]
    person: str
    answer: str
    others: tuple[tuple[str, str], ...]  # (name, year) of the other people in the last group


class MultiHop:
    """The questions of one setting, a `canonlm.suites.questions.Questions`.

    Slices: `position` of the direct fact among all facts, from 1; with a background, the `quarter` of the text (1 to 4)
    in which it stands; for k > 1, unless `published`, `asked`, the position of the fact about the person in the
    question, and `backward`, the number of links of the chain that stand before the fact that they lead to.
    """

    # "exact": the text begins, after blanks, with the year, and no digit follows. "year": the first number of exactly
    # four digits in it is the year.
    measures: ClassVar[tuple[str, ...]] = ("exact", "year")
    max_new_tokens = 16  # enough for a few words before the year, and for tokenizers that cut it into digits
    stop: Sequence[str] = (".",)

    def __init__(self, settings: MultiHopSettings, tokens: Tokens, split: str = "test") -> None:
        """tokens: counts the tokens of a text. ValueError for an unreadable text, and for too many people."""
        check_split(split)
        self.settings, self.split, self.name = settings, split, settings.name
        self._tokens, self._background = tokens, open_background(settings.text)
        self._lengths: dict[int, int] = {}  # sentences of a background, so that its tokens are counted once
        # Backgrounds have no splits, and other suites use them too, so their seed includes suite and split.
        self._background_seed = random.Random(f"multihop {split} {settings.seed} background").getrandbits(63)
        check_people("people", settings.k * settings.people, _pools().sizes)

    def __len__(self) -> int:
        return self.settings.n

    def __getitem__(self, index: int) -> Question:
        index = range(len(self))[index]
        story = self.story(index)
        background = self._sentences(index)
        text = " ".join(scatter(story.facts, story.places, background)[0])
        beginning = BEGINNING.format(name=story.person)
        if self.settings.k == 1:
            prompt = f"{text}\n\n{beginning}"
        else:
            prompt = f"{INSTRUCTION}\n\n<context>\n{text}\n</context>\n\n{beginning}"
        return Question(prompt, story.answer, self._slice(story))

    def story(self, index: int) -> Story:
        """Question `index` without its background."""
        k, n, published = self.settings.k, self.settings.people, self.settings.published
        rng = random.Random(f"multihop {self.split} {self.settings.seed} {index}")
        names = [_name(number) for number in rng.sample(range(prod(_pools().sizes[:3])), k * n)]
        years = rng.sample(YEARS, n)
        facts = [DIRECT.format(name=name, year=year) for name, year in zip(names, years, strict=False)]
        linked_to = list(range(n))  # person → the person of the group before, in numbers of `names` and of `facts`
        for first in range(n, k * n, n):
            matched = rng.sample(range(first - n, first), n)
            linked_to += matched
            pairs = zip(names[first : first + n], matched, strict=True)
            facts += [LINK.format(name=name, other=names[other]) for name, other in pairs]
        person = (k - 1) * n + (0 if published else rng.randrange(n))
        order = list(range(k * n)) if published else rng.sample(range(k * n), k * n)
        needed = _chain(person, n, linked_to)
        return Story(
            facts=tuple(facts[fact] for fact in order),
            places=tuple(sorted(rng.random() for _ in facts)),
            chain=tuple(map(order.index, needed)),
            person=names[person],
            answer=str(years[needed[0]]),
            others=tuple(
                (names[other], str(years[_chain(other, n, linked_to)[0]]))
                for other in range((k - 1) * n, k * n)
                if other != person
            ),
        )

    def grade(self, question: Question, answer: str) -> dict[str, bool]:
        """Whether an answer is right, by both measures."""
        match = re.search(r"(?<![0-9])[0-9]{4}(?![0-9])", answer)
        return {
            "exact": re.match(f"{question.answer}(?![0-9])", answer.strip()) is not None,
            "year": match is not None and match[0] == question.answer,
        }

    def _sentences(self, index: int) -> list[str]:
        sentences = self._background.sentences(self._background_seed, index)
        if index in self._lengths:
            return [next(sentences) for _ in range(self._lengths[index])]
        filled = fill(sentences, self.settings.background, self._tokens)
        self._lengths[index] = len(filled)
        return filled

    def _slice(self, story: Story) -> dict[str, int]:
        slice = {"position": story.chain[0] + 1}
        if self.settings.background:
            slice["quarter"] = int(4 * story.places[story.chain[0]]) + 1
        if self.settings.k > 1 and not self.settings.published:
            links = zip(story.chain, story.chain[1:], strict=False)
            slice |= {"asked": story.chain[-1] + 1, "backward": sum(later < earlier for earlier, later in links)}
        return slice


def _chain(person: int, n: int, linked_to: Sequence[int]) -> list[int]:
    """The people in the chain to `person`, from the one whose year the text states."""
    chain = [person]
    while chain[0] >= n:
        chain.insert(0, linked_to[chain[0]])
    return chain


def write_texts(questions: MultiHop, out: Path, on_progress: Callable[[int], None] = lambda done: None) -> None:
    """Write training texts as lines `{"text": …}`, which `canonlm data prepare` reads: every prompt with its answer,
    then the same question about the others of the last group. (Answers are the only predictable tokens of such a text,
    so a model learns from them.)

    `out` is complete or absent. ValueError: it exists already, does not end in .jsonl, or cannot be written.
    """
    if out.suffix != ".jsonl":
        raise expected("OUT", "a name that ends in .jsonl", str(out))
    if out.exists():
        raise expected("OUT", "a file that does not exist yet", str(out))
    with writing("OUT", out, "file"), complete_file(out) as file:
        for index in range(len(questions)):
            question = questions[index]
            more = "".join(f" {BEGINNING.format(name=name)} {year}." for name, year in questions.story(index).others)
            text = f"{question.prompt} {question.answer}.{more}"
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            on_progress(index + 1)


@cache
def _pools() -> Pools:
    return load()


def _name(number: int) -> str:
    """The full name with this number among all combinations."""
    pools = _pools()
    number, last = divmod(number, len(pools.last))
    first, middle = divmod(number, len(pools.middle))
    return f"{pools.first[first]} {pools.middle[middle]} {pools.last[last]}"

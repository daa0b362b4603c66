"""Background of a question: neutral sentences around its facts.

A background is one stream of sentences per question. The tokenizer decides only how much of it is read: for any two
tokenizers or lengths, one text is a prefix of the other.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from canonlm.core.errors import expected
from canonlm.core.safe_yaml import read_yaml
from canonlm.core.user_folders import expanded
from canonlm.suites.reading import text_of


class Background(Protocol):
    def sentences(self, seed: int, index: int) -> Iterator[str]:
        """The sentences for question `index`, without blanks around them. The generator's never end, a file's do."""
        ...


def open_background(name: str | None) -> Background:
    """None: the generator. Otherwise the text file of that path; ValueError if it cannot be read."""
    return Neutral() if name is None else TextFile(expanded(name))


def fill(sentences: Iterator[str], budget: int, tokens: Callable[[str], int]) -> list[str]:
    """The fewest first sentences that have at least `budget` tokens in total; each sentence is counted by itself.

    ValueError: all sentences have fewer in total.
    """
    chosen: list[str] = []
    total = 0
    while total < budget:
        if (sentence := next(sentences, None)) is None:
            what = f"at most {total} tokens, which is all that the text has"
            raise expected("background", what, budget)
        chosen.append(sentence)
        total += tokens(sentence)
    return chosen


class TextFile:
    """Consecutive sentences of a UTF-8 text: all of them once, from a uniformly drawn one on and around the end.

    A sentence ends at a full stop, question mark or exclamation mark before a blank (so also after "Dr."), and where a
    paragraph does; a line break inside a paragraph is a blank. The text is held in memory.
    """

    def __init__(self, path: Path) -> None:
        text = text_of(path, "text", "a text file in UTF-8")
        self._sentences = [sentence for paragraph in _PARAGRAPHS.split(text) for sentence in _split(paragraph)]
        if not self._sentences:
            raise expected("text", "a text file with at least one sentence", str(path))

    def sentences(self, seed: int, index: int) -> Iterator[str]:
        start = random.Random(f"text {seed} {index}").randrange(len(self._sentences))
        return map(self._sentences.__getitem__, chain(range(start, len(self._sentences)), range(start)))


_PARAGRAPHS = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"""(?<=[.!?…])\s+|(?<=[.!?…]["'”’)\]])\s+|(?<=[。！？])\s*""")


def _split(paragraph: str) -> list[str]:
    return [" ".join(sentence.split()) for sentence in _ENDS.split(paragraph) if sentence.strip()]


class Neutral:
    """Sentences of a small grammar about work, weather, animals and things: more than two hundred million different
    ones, without digits, dates and names, and without the places and objects that another suite asks about."""

    def sentences(self, seed: int, index: int) -> Iterator[str]:
        rng = random.Random(f"neutral {seed} {index}")
        while True:
            template, slots = rng.choice(_TEMPLATES)
            words = {slot: rng.sample(WORDS[slot], 2) if twice else rng.choice(WORDS[slot]) for slot, twice in slots}
            sentence = template.format(**words)
            yield sentence[0].upper() + sentence[1:]


_DATA: dict[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))[0]
TEMPLATES = tuple(_DATA["templates"])
WORDS: dict[str, tuple[str, ...]] = {slot: tuple(words) for slot, words in _DATA["words"].items()}


def _compiled(template: str) -> tuple[str, tuple[tuple[str, bool], ...]]:
    """A template with its slots in order, and whether each takes two words."""
    slots = dict.fromkeys(re.findall(r"{(\w+)", template))
    return template, tuple((slot, f"{{{slot}[1]}}" in template) for slot in slots)


_TEMPLATES = tuple(map(_compiled, TEMPLATES))


def scatter(facts: Sequence[str], places: Sequence[float], background: Sequence[str]) -> tuple[list[str], list[int]]:
    """(all sentences, the positions of the facts among them).

    places: for each fact, how far into the background it stands, in [0, 1) and ascending: before the background's
    sentence floor(place * (sentences + 1)), or at its end.
    """
    sentences: list[str] = []
    where, used = [], 0
    for fact, place in zip(facts, places, strict=True):
        slot = int(place * (len(background) + 1))
        sentences += background[used:slot]
        where.append(len(sentences))
        sentences.append(fact)
        used = slot
    return [*sentences, *background[used:]], where

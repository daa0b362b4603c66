"""bioR: biographies that a chat model writes. `prompt` builds the instruction, `read` reads the texts back.

Nothing in this file calls a model: send the prompts to one of your choice and store its answers. The prompts have the
structure of the original release in our own words: a request for a length and the full name, then four statements in
random order, each in one of several wordings: education (7 x 4), birth city (6), company and its city (14), birth date
(2).
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from canonlm.core.errors import expected
from canonlm.core.numba_cache import njit
from canonlm.core.safe_yaml import read_yaml
from canonlm.core.untrusted import read_bytes
from canonlm.tasks.capo.people import Person, name_space, person
from canonlm.tasks.capo.pools import Pools
from canonlm.tasks.random import below, check_count, shuffle, stream

LENGTHS = range(50, 200)  # words that mode 0 asks for by default

_PROMPTS = 101  # takes the place of a split in the key of a stream, like people.PEOPLE

_WORDINGS: list[list[str]] = [*read_yaml(Path(__file__).parent / "data" / "bior.yaml")[0].values()]


def prompt(person: Person, seed: int, *, mode: int = 0, words: int | None = None, draw: int = 0) -> str:
    """An instruction for a chat model: a pure function of its arguments. Another `draw` changes wording and order.

    mode 0 asks for a biography of `words` words, uniform on 50 … 199 unless given. mode 1 requires `words`, and also
    asks to vary wording and order.
    """
    if mode not in (0, 1):
        raise expected("mode", "0 or 1", mode)
    if words is not None:
        check_count("words", words, min=1)
    elif mode == 1:
        raise expected("words", "the number of words to ask for (mode 1 has no default)", words)
    choices = _draws(
        check_count("seed", seed),
        person.index,
        check_count("draw", draw),
        np.array([len(LENGTHS), *map(len, _WORDINGS)]),
    )
    length, order = choices[0], choices[-4:]
    university, field, *others = (forms[i] for forms, i in zip(_WORDINGS, choices[1:-4], strict=True))
    units = [university + field, *others]
    parts = [
        f"Write a biography of about {words or LENGTHS[length]} words about {person.name}.",
        *(units[unit].format_map(asdict(person)) for unit in order),
        "Mention all of this; copy names, places and the date word for word.",
        f'Refer to the person as "{person.pronoun}".',
    ]
    if mode == 1:
        parts.append("Be creative: vary the wording, and tell the facts in an order of your own.")
    return " ".join(parts)


@njit(cache=True)
def _draws(seed, i, draw, sizes):
    """One uniform draw below each of the sizes, then a random order of 0 … 3."""
    state, gamma = stream(seed, _PROMPTS, i, draw)
    out = np.empty(len(sizes) + 4, np.int64)
    for k in range(len(sizes)):
        state, out[k] = below(state, gamma, sizes[k])
    out[-4:] = np.arange(4)
    shuffle(state, gamma, out[-4:], 4, 4)
    return out


@dataclass(frozen=True)
class Rewritten:
    """A text about person `person`; text[slice(*spans[key])] is the first mention of the name or a value.

    key: "name" or an attribute; those that the text does not mention have no span. If the birth city is also the
    company city, both have the same span.
    """

    person: int
    text: str
    spans: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Rewrites:
    """All texts of a file, and a line for every name or value that its text does not contain word for word."""

    texts: tuple[Rewritten, ...]
    missing: tuple[str, ...]


def read(path: Path, seed: int, pools: Pools) -> Rewrites:
    """Texts about the people (seed, 0), (seed, 1), …, from UTF-8 lines.

    *.jsonl: lines {"person": 3, "text": "…"}, in any order, any number per person. Any other file: the first line is
    about person 0, the next about person 1, and so on. Raises ValueError with the file and the line.
    """
    try:
        raw = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {error.object.count(10, 0, error.start) + 1}: not UTF-8") from None
    if not raw.strip():
        raise ValueError(f"{path}: expected one biography per line, got an empty file")
    texts, missing = [], []
    for number, line in enumerate(raw.rstrip().split("\n"), 1):
        where = f"{path}, line {number}"
        index, text = _from_json(line, where) if path.suffix == ".jsonl" else (number - 1, line.strip())
        if not text.strip():
            raise ValueError(f"{where}: expected a biography, got an empty text")
        if index >= name_space(pools.sizes):
            raise ValueError(f"{where}: the pools have names for {name_space(pools.sizes)} people, got person {index}")
        about = person(seed, index, pools)
        values = {"name": about.name, **about.values}
        rewritten = Rewritten(index, text, _spans(text, values))
        texts.append(rewritten)
        missing += [
            f'line {number}: the text about person {index} has no {key} "{values[key]}"'
            for key in values
            if key not in rewritten.spans
        ]
    return Rewrites(tuple(texts), tuple(missing))


def _from_json(line: str, where: str) -> tuple[int, str]:
    what = f'{where}: expected {{"person": 0, "text": "…"}}'
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{what}, got invalid JSON ({error})") from None
    index, text = (row.get("person"), row.get("text")) if isinstance(row, dict) else (None, None)
    if type(index) is not int or index < 0 or not isinstance(text, str):
        raise ValueError(f"{what}, got {line.strip()}")
    return index, text


def _spans(text: str, values: dict[str, str]) -> dict[str, tuple[int, int]]:
    """The first span of each value, as whole words and not inside a longer value of the person."""
    spans, taken = {}, list[tuple[int, int]]()
    for key, value in sorted(values.items(), key=lambda item: -len(item[1])):
        places = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text)]
        free = [s for s in places if not any(a <= s[0] and s[1] <= b and (a, b) != s for a, b in taken)]
        if free:
            spans[key] = free[0]
        taken += places
    return {key: spans[key] for key in values if key in spans}

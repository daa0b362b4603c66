"""Capo's text as tokens: every piece of a biography is tokenised once, then the sampler only copies.

A piece is a name, a pronoun, a part of a date, a value, or the part of a template before or after its value; a space
belongs to the piece after it. Each is cut out of a tokenised sentence by character offsets, so its tokens are those of
running text. Tokenizers that split at spaces and punctuation never join two pieces. If another tokenizer, or an entry
such as "Acme Inc." before a period, joins a value with its sentence, that sentence is tokenised as one text, and its
three pieces are kept apart from the others. Names and dates must not be joined with the words around them.

The vocabulary is `<bos>` (0) and the tokens that occur in the pieces, in the tokenizer's order. The paper reduced
GPT-2's tokenizer in the same way.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canonlm.core.errors import expected, panics_raised
from canonlm.core.untrusted import check_tokenizer, path_inside, read_text
from canonlm.tasks.base import Vocab
from canonlm.tasks.capo.people import PRONOUNS
from canonlm.tasks.capo.pools import ATTRIBUTES, DAYS, MONTHS, YEARS, Pools, load
from canonlm.tasks.capo.templates import QUESTIONS, TEMPLATES, split

SHIPPED = Path(__file__).parent / "data" / "tokenizer.json"  # made by train_tokenizer.py
BOS = 0

# Kinds of pieces; attribute a has the kinds VALUE + a (but birth dates: MONTH, DAY, YEAR), BETWEEN + a, …
FIRST, MIDDLE, LAST, PRONOUN, MONTH, DAY, YEAR, VALUE = range(8)
BETWEEN, AFTER, ASK, ASKED, KINDS = VALUE + 6, VALUE + 12, VALUE + 18, VALUE + 24, VALUE + 30

Slot = tuple[int, int]  # (kind, index in that kind)


class Pieces(NamedTuple):
    """The tokens that samplers copy. Piece p is tokens[start[p] : start[p + 1]]; index i of a kind is base[kind] + i.

    joined[r, v], for row r = base[BETWEEN + a] + t - base[BETWEEN]: the first of the three pieces that replace between,
    value and after if template t of attribute a is joined with value v, else 0. Shape [0, 0] if no pair is joined.
    """

    tokens: np.ndarray  # int32
    start: np.ndarray  # int32 [pieces + 1]
    base: np.ndarray  # int32 [KINDS + 1]
    joined: np.ndarray  # int32

    def piece(self, p: int) -> tuple[int, ...]:
        return tuple(self.tokens[self.start[p] : self.start[p + 1]].tolist())


class TextVocab(Vocab):
    """A vocabulary that decodes to text. `ids_of[i]` is the tokenizer's id of token i (-1: bos).

    `unused`: the number of tokens after these, which occur in no text.
    """

    def __init__(self, tokenizer: Any, ids_of: np.ndarray, unused: int = 0) -> None:
        occurring = ["<bos>", *map(tokenizer.id_to_token, ids_of[1:].tolist())]
        super().__init__([*occurring, *(f"<unused {i}>" for i in range(unused))], ["<bos>"])
        self.tokenizer, self.ids_of = tokenizer, ids_of

    def text(self, tokens: Iterable[object]) -> str:
        """The decoded text, stripped; anything but a token of a text appears as <bos>, <99999> or <None>."""
        parts: list[str] = []
        for is_text, run in groupby(tokens, lambda token: BOS < self.ids.get(self.name(token), BOS) < len(self.ids_of)):
            if is_text:
                parts.append(self.tokenizer.decode(self.ids_of[np.array(list(run))].tolist()).strip())
            else:
                parts += map(self.name, run)
        return " ".join(parts)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, tokenised on its own. ValueError if it has tokens that no biography has."""
        with panics_raised("capo.tokenizer"):
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        ours = np.searchsorted(self.ids_of, ids)
        if (np.append(self.ids_of, -1)[ours] != ids).any():
            raise expected("text", "only tokens that biographies have", text)
        return ours.tolist()


@dataclass(frozen=True, eq=False)
class Text:
    """The pools and templates in tokens. `joined` counts the (template, value) pairs that are tokenised as one text."""

    pools: Pools
    pieces: Pieces
    vocab: TextVocab
    joined: int

    def longest(self, fullname: bool) -> int:
        """An upper bound on the tokens of a document: a biography, or a question with its answer."""
        width, base = np.diff(self.pieces.start), self.pieces.base
        widths = [width[base[kind] : base[kind + 1]] for kind in range(KINDS)]
        longest = [int(lengths.max(initial=0)) for lengths in widths]
        joined = max((int(width[p : p + 3].sum()) for p in range(base[KINDS], len(width), 3)), default=0)
        name = longest[FIRST] + longest[MIDDLE] + longest[LAST]
        values = [longest[MONTH] + longest[DAY] + longest[YEAR], *longest[VALUE + 1 : VALUE + 6]]
        statements = [max(int((widths[BETWEEN + a] + widths[AFTER + a]).max()) + values[a], joined) for a in range(6)]
        questions = [longest[ASK + a] + name + longest[ASKED + a] + values[a] for a in range(6)]
        subjects = 6 * name if fullname else name + 5 * longest[PRONOUN]
        return 1 + max(subjects + sum(statements), *questions)


@cache
def tokenise(tokenizer: str | None = None, pools: str | None = None) -> Text:
    """Tokenise our pools or those of a folder, with our tokenizer or a Hugging Face one: the path of a tokenizer.json
    or of a folder that holds a tokenizer. ValueError if a file is damaged or a name is joined with its sentence."""
    entries = load(None if pools is None else Path(pools))
    cutter = Cutter(open_tokenizer(tokenizer), entries)
    cutter.learn()
    if tokenizer is not None or pools is not None:  # a test checks ours
        cutter.check()
    return cutter.text()


def files_of(tokenizer: Path) -> list[Path]:
    """The files of a tokenizer: in a folder, its tokenizer.json, or all that other formats may consist of."""
    if not tokenizer.is_dir():
        return [tokenizer]
    parts = sorted(file for file in tokenizer.iterdir() if file.suffix in (".json", ".txt", ".model"))
    return [file for file in parts if file.name == "tokenizer.json"] or parts


def open_tokenizer(path: str | None) -> Any:
    """The tokenizer of a file or a folder, or ours. InvalidSetting if it cannot be read."""
    from tokenizers import Tokenizer

    file = SHIPPED if path is None else Path(path)
    try:
        if file.is_dir() and not (file / "tokenizer.json").exists():
            from transformers import AutoTokenizer  # converts other formats; slow to import

            check_tokenizer(file)
            tokenizer = AutoTokenizer.from_pretrained(file, local_files_only=True).backend_tokenizer
        else:
            with panics_raised(file):
                tokenizer = Tokenizer.from_str(
                    read_text(path_inside(file, "tokenizer.json") if file.is_dir() else file)
                )
    except Exception as error:  # the library raises plain Exceptions
        what = "a tokenizer.json, or a folder with a tokenizer"
        why = str(error).partition("\n")[0] or type(error).__name__
        raise expected("capo.tokenizer", what, f"{path}: {why}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


Part = tuple[Slot | None, str]  # None: only context for the other parts


class Cutter:
    """Tokenises sentences and cuts them into pieces."""

    def __init__(self, tokenizer: Any, pools: Pools) -> None:
        self.tokenizer, self.pools = tokenizer, pools
        self.known: dict[Slot, tuple[int, ...]] = {}
        self.joined: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}  # (attribute, template, value)
        self.counts = [*self.pools.sizes[:3], 2, len(MONTHS), len(DAYS), len(YEARS), 0]
        self.counts += [len(pools.values[attribute]) for attribute in ATTRIBUTES[1:]]
        self.counts += 2 * [len(TEMPLATES[attribute]) for attribute in ATTRIBUTES] + 12 * [1]

    def learn(self) -> None:
        """Learn every piece from one sentence."""
        names, dates = self.counts[FIRST : FIRST + 3], self.counts[MONTH : MONTH + 3]
        self._take(self._statement(self._name(*at), 1, 0) for k in range(3) for at in _each(names, k))
        self._take(self._statement(self._pronoun(g), 1, 0) for g in range(2))
        self._take(self._statement(self._pronoun(0), 0, 0, self._date(*at)) for k in range(3) for at in _each(dates, k))
        for a in range(6):
            self._take(self._statement(self._pronoun(0), a, t) for t in range(self.counts[BETWEEN + a]))
            self._take(
                self._statement(self._pronoun(0), a, 0, self._value(a, v)) for v in range(self.counts[VALUE + a])
            )
            self._take([self._question(self._name(0, 0, 0), a, self._value(a, 0))])

    def check(self) -> None:
        """Try every template with every value, month, day and year and every kind of subject, every question with every
        value, and every last name with every template that has no space after it. Logs how many pairs are joined."""
        names = [self._name(0, 0, last) for last in range(self.counts[LAST])]
        for a in range(6):
            values = [self._value(a, v) for v in range(self.counts[VALUE + a])]
            values += [self._date(*at) for k in range(3) for at in _each(self.counts[MONTH : MONTH + 3], k) if a == 0]
            templates = range(self.counts[BETWEEN + a])
            subjects = names[0], self._pronoun(1)
            self._take(self._statement(self._pronoun(0), a, t, value) for t in templates for value in values)
            self._take(self._statement(subject, a, t) for t in templates for subject in subjects)
            tight = [t for t in templates if not split(TEMPLATES[ATTRIBUTES[a]][t])[0].startswith(" ")]
            self._take(self._statement(name, a, t) for t in tight for name in names)
            self._take(self._question(name, a, self._value(a, 0)) for name in names)
            self._take(self._question(names[0], a, value) for value in values)
        if self.joined:
            every = sum(len(TEMPLATES[attribute]) * len(values) for attribute, values in self.pools.values.items())
            logging.getLogger(__name__).warning(
                "capo: %d of %d pairs of template and value are tokenised as one text", len(self.joined), every
            )

    def text(self) -> Text:
        for (a, t, v), parts in self.joined.items():  # pieces that occur in joined sentences only
            for slot, part in zip(((BETWEEN + a, t), (VALUE + a, v), (AFTER + a, t)), parts, strict=True):
                self.known.setdefault(slot, part)
        slots = [(kind, i) for kind, count in enumerate(self.counts) for i in range(count)]
        pieces = [self.known[slot] for slot in slots] + [part for parts in self.joined.values() for part in parts]
        ids_of = np.array([-1, *sorted({token for piece in pieces for token in piece})])
        tokens = np.searchsorted(ids_of, [token for piece in pieces for token in piece]).astype(np.int32)
        start = np.array([0, *accumulate(map(len, pieces))], np.int32)
        base = np.array([0, *accumulate(self.counts)], np.int32)
        rows = base[AFTER] - base[BETWEEN] if self.joined else 0
        joined = np.zeros((rows, max(self.counts[VALUE:BETWEEN]) if self.joined else 0), np.int32)
        for i, (a, t, v) in enumerate(self.joined):
            joined[base[BETWEEN + a] + t - base[BETWEEN], v] = base[KINDS] + 3 * i
        return Text(
            self.pools, Pieces(tokens, start, base, joined), TextVocab(self.tokenizer, ids_of), len(self.joined)
        )

    # -- sentences in parts -------------------------------------------------------------------------------------------

    def _name(self, first: int, middle: int, last: int) -> list[Part]:
        pools = (FIRST, first, self.pools.first), (MIDDLE, middle, self.pools.middle), (LAST, last, self.pools.last)
        return [((kind, i), f" {pool[i]}") for kind, i, pool in pools]

    def _pronoun(self, gender: int) -> list[Part]:
        return [((PRONOUN, gender), f" {PRONOUNS[gender]}")]

    def _date(self, month: int, day: int, year: int) -> list[Part]:
        return [
            ((MONTH, month), f" {MONTHS[month]}"),
            ((DAY, day), f" {DAYS[day]}"),
            ((YEAR, year), f", {YEARS[year]}"),
        ]

    def _value(self, a: int, v: int) -> list[Part]:
        return self._date(0, 0, 0) if a == 0 else [((VALUE + a, v), f" {self.pools.values[ATTRIBUTES[a]][v]}")]

    def _statement(self, subject: list[Part], a: int, t: int, value: list[Part] | None = None) -> list[Part]:
        """Between two other sentences, as in running text."""
        between, after = split(TEMPLATES[ATTRIBUTES[a]][t])
        sentence: list[Part] = [((BETWEEN + a, t), between), *(value or self._value(a, 0)), ((AFTER + a, t), after)]
        return [(None, "."), *subject, *sentence, (None, " She")]

    def _question(self, name: list[Part], a: int, value: list[Part]) -> list[Part]:
        before_name, after_name = QUESTIONS[ATTRIBUTES[a]].split(" {name}")
        return [(None, "."), ((ASK + a, 0), f" {before_name}"), *name, ((ASKED + a, 0), after_name), *value]

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _take(self, sentences: Iterable[list[Part]]) -> None:
        sentences = list(sentences)
        texts = ["".join(text for _, text in parts) for parts in sentences]
        with panics_raised("capo.tokenizer"):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        for parts, encoding in zip(sentences, encodings, strict=True):
            pieces = _cut(encoding, [text for _, text in parts])
            if pieces is None or any(
                slot is not None and self.known.setdefault(slot, piece) != piece
                for (slot, _), piece in zip(parts, pieces, strict=True)
            ):
                self._take_joined(parts, encoding)

    def _take_joined(self, parts: list[Part], encoding: Any) -> None:
        """Keep the sentence after its subject as three pieces; a token partly in the value belongs to the value."""
        slots = [slot or (-1, 0) for slot, _ in parts]
        at = next((i for i, (kind, _) in enumerate(slots) if VALUE <= kind < BETWEEN), 0)
        pieces = _cut(encoding, [text for _, text in parts], greedy=at)
        if at and BETWEEN <= slots[at - 1][0] < AFTER and pieces is not None:
            subject = range(1, at - 1)
            if all(self.known.setdefault(slots[i], pieces[i]) == pieces[i] for i in subject):
                self.joined[slots[at][0] - VALUE, slots[at - 1][1], slots[at][1]] = pieces[at - 1 : at + 2]
                return
        sentence = "".join(text for _, text in parts[1:])
        what = "a tokenizer that keeps names, dates and questions apart from the words around them"
        raise expected("capo.tokenizer", what, f"one that does not in{sentence}")


def _each(counts: Sequence[int], k: int) -> list[list[int]]:
    """Every entry of pool k, with the first entries of the others."""
    return [[i if at == k else 0 for at in range(len(counts))] for i in range(counts[k])]


def _cut(encoding: Any, texts: list[str], greedy: int = -1) -> list[tuple[int, ...]] | None:
    """The tokens of each text; None if a token lies in two texts, but text number `greedy` takes those that it shares.

    Tokenizers may or may not include a leading space in a token's offsets, so a token belongs to the text with its last
    character.
    """
    ends = list(accumulate(map(len, texts)))
    pieces: list[list[int]] = [[] for _ in texts]
    at = 0
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        while stop > ends[at]:
            at += 1
        first = at
        while first > 0 and start < ends[first - 1]:
            first -= 1
        if first < at and not first <= greedy <= at:
            return None
        pieces[greedy if first <= greedy <= at else at].append(token)
    return [tuple(piece) for piece in pieces]

"""Capo: how many facts does the model know? Measures knowledge capacity, in bits per parameter.

    <bos> Tameda Umuno Noraugh was born on September 8, 2082. She majored in Acoustics. …

N people, each with a name, a birth date, a birth city, a university, a field, a company and the company's city, in
biographies of six sentences. Training shows every person `exposures` times; the test measures how well the model
predicts the same people's names and values in texts that it has not seen (bioS and its bits; arXiv 2512.17351, App. A).
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from canonlm.core.errors import InvalidSetting, expected, shown, unknown
from canonlm.tasks.base import Placed, Query, Sample, Slice, Task, register
from canonlm.tasks.capo.bits import DATES, Bits, bits
from canonlm.tasks.capo.documents import OF_VALUE, TextSettings
from canonlm.tasks.capo.people import check_people
from canonlm.tasks.capo.pools import ATTRIBUTES, FILES, load
from canonlm.tasks.capo.reading import Reader, reader_of
from canonlm.tasks.capo.rewritten import RewrittenStream, rewritten
from canonlm.tasks.capo.stream import Stream
from canonlm.tasks.capo.tokens import BOS, TextVocab, files_of, tokenise
from canonlm.tasks.describe import Measure, Scale, Score
from canonlm.tasks.packing import IGNORE, Windows
from canonlm.tasks.random import TRAIN, check_count, check_split
from canonlm.tasks.rows import Rows, by_answer
from canonlm.tasks.spec import TaskSpec


@register("capo")
class Capo(Task):
    """Biographies of N people, each `exposures` times. Paper: loss on all tokens, a tokenizer of 3275 tokens."""

    class Spec(TaskSpec):
        N: int = Field(50_000, ge=1)  # people
        exposures: int = Field(100, ge=1, le=100_000)  # biographies of each person in training, one per pass
        variant: Literal["fresh", "multi", "single"] = "fresh"  # new texts in every pass, `texts` in turn, one text
        texts: int = Field(5, ge=1, le=100_000)  # per person, under variant: multi
        permute: bool = True  # sentences in random order; False: as in ATTRIBUTES
        fullname: bool = False  # the full name in all sentences, not only in the first
        questions: bool = False  # training also asks about the first half of the people, the test about the others
        rewrites: str | None = None  # a file of texts by a chat model (canonlm.tasks.capo.bior), not from templates
        people_seed: int | None = Field(None, ge=0)  # whose people the rewrites describe: 0 if None; others: the run's
        pools: str | None = None  # a folder of names and values (canonlm.tasks.capo.pools); None: ours
        tokenizer: str | None = None  # a tokenizer.json or a folder with one; None: ours
        vocab_size: int | None = Field(None, ge=1, le=10_000_000)  # including tokens that never occur; None: no others

        @model_validator(mode="after")
        def _enough_people(self) -> "Capo.Spec":
            try:
                pools = load(None if self.pools is None else Path(self.pools))
            except ValueError as error:
                raise InvalidSetting(f"{self.task}.pools", f"{self.task}.pools: {error}") from None
            check_people(f"{self.task}.N", self.N, pools.sizes)
            if self.questions and self.N < 2:
                raise self.refuse("N", "at least 2 people, as training has questions about half of them", self.N)
            if self.rewrites is not None:
                for key in ("variant", "texts", "permute", "fullname", "questions"):
                    if (value := getattr(self, key)) != (usual := type(self).model_fields[key].default):
                        raise self.refuse(key, f"{shown(usual)}, as rewrites are not made from templates", value)
            elif self.people_seed is not None:
                raise self.refuse("people_seed", "no value without rewrites", self.people_seed)
            return self

    difficulties = {f"capo-{name}": {"N": N * 1000, "vocab_size": 3275} for name, N in {
        "50k": 50, "100k": 100, "200k": 200, "500k": 500, "1m": 1000, "2m": 2000}.items()}  # fmt: skip
    loss_on = "all"
    evaluation = "canonlm.train.evals.facts:FactEval"
    tests_what_it_trained_on = True

    about = "The model reads short biographies in training and must later recall facts about those people."
    scales = {
        "attribute": Scale(
            "fact",
            str,
            "A fact is known when the model continues a newly worded biography, cut before the fact, with exactly it.",
        ),
        "question": Scale(
            "fact asked for",
            lambda v: f"{v}, asked",
            "The same facts as answers to questions, about people without questions in training.",
        ),
    }
    measures = {
        "bits_per_parameter": Measure(
            "bits per parameter",
            "how much the model has stored about the people, in bits, for each of its parameters: higher is better.",
        ),
        "bits_per_person": Measure("bits per person", "bits stored, for each person."),
    }
    score = Score("bits_per_parameter", "fraction of people whose fact is known")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._stream: Stream | RewrittenStream
        self._reader: Reader | RewrittenStream
        if spec.rewrites is None:
            self.text = tokenise(spec.tokenizer, spec.pools)
            self.pools, vocab, self.max_len = self.text.pools, self.text.vocab, self.text.longest(spec.fullname)
            self._stream, self._reader = _stream(spec), reader_of(self.text)
        else:
            of_texts = spec.rewrites, spec.people_seed or 0, spec.N, spec.exposures, spec.pools, spec.tokenizer
            self._stream = self._reader = texts = rewritten(*of_texts)
            self.pools, vocab, self.max_len = texts.pools, texts.vocab, texts.longest
        self.vocab = self._padded(vocab)
        self.asked_in_training = spec.N // 2 if spec.questions else 0  # the people below this number

    def slices(self) -> list[Slice]:
        kinds = ("attribute", "question") if self.spec.questions else ("attribute",)
        return [{kind: attribute} for kind in kinds for attribute in ATTRIBUTES]

    def chance(self, slice: Slice) -> float:
        """The guess is the likeliest value; where the text has named the company or its city before, one that fits."""
        kind, attribute = next(iter(slice.items()))
        if attribute == "birth date":
            return 1 / DATES
        values = self.pools.values[str(attribute)]
        likeliest = max(map(values.count, set(values))) / len(values)
        if kind == "question" or self.spec.rewrites or attribute not in ("company city", "company"):
            return likeliest
        fits = 1.0 if attribute == "company city" else len({*self.pools.company_city}) / len(values)
        share = 0.5 if self.spec.permute else float(attribute == "company")  # of the texts that have named the other
        return share * fits + (1 - share) * likeliest

    def bits(self, name_nats: float, value_nats: float) -> Bits:
        """The bits that a model knows, from its losses on the name (role 1) and on pronoun and values (roles 2 and 3).
        Both are in nats, summed per person and averaged over people. See `canonlm.tasks.capo.bits`."""
        pronoun = not (self.spec.fullname or self.spec.rewrites)  # rewrites have no role 2
        return bits(name_nats, value_nats, self.spec.N, self.pools.sizes, pronoun=pronoun)

    @property
    def files(self) -> list[Path]:
        pools, tokenizer, rewrites = self.spec.pools, self.spec.tokenizer, self.spec.rewrites
        names = [] if pools is None else [Path(pools, f"{name}.txt") for name in FILES]
        tokens = [] if tokenizer is None else files_of(Path(tokenizer))
        return [*names, *tokens, *([] if rewrites is None else [Path(rewrites)])]

    # -- the stream ---------------------------------------------------------------------------------------------------

    def training_windows(self, seed: int, seq_len: int) -> int:
        """The number of windows that contain all exposures. Later windows are padding: bos, without a label."""
        return sum(self._windows(seed, seq_len))

    def has_windows(self, seed: int, seq_len: int, count: int) -> bool:
        return any(total >= count for total in accumulate(self._windows(seed, seq_len)))

    def _windows(self, seed: int, seq_len: int) -> Iterator[int]:
        """The number of windows of each pass of the training stream, counted when the iterator gets there."""
        seed, seq_len = check_count("seed", seed), check_count("seq_len", seq_len, min=1)
        return (self._stream.windows_of(seed, TRAIN, e, seq_len) for e in range(self.spec.exposures))

    def _fill(self, seed: int, split: int, start: int, first: int, loss_on_all: bool, out: Windows) -> None:
        """Write windows of the passes over all people: see `canonlm.tasks.capo.stream`.

        All splits have the same people and number of passes; all but "train" have fresh sentences of their own.
        """
        self._stream.fill(seed, split, start, loss_on_all, out)

    def sample(self, split: str, seed: int, index: int, j: int = 0, *, loss_on: str | None = None) -> Sample:
        """The biography of person index % N in pass j + index // N of the split."""
        e, person = divmod(check_count("index", index), self.spec.N)
        number = _text_number(self.spec, check_split(split), e + check_count("j", j))
        return self._sample(check_count("seed", seed), check_split(split), number, person, loss_on)

    def question(self, seed: int, index: int, attribute: str, *, loss_on: str | None = None) -> Sample:
        """The question about an attribute of person index % N, with its answer."""
        if attribute not in ATTRIBUTES:
            raise unknown("attribute", attribute, ATTRIBUTES)
        person = check_count("index", index) % self.spec.N
        number = self._question_number(person, ATTRIBUTES.index(attribute))
        return self._sample(check_count("seed", seed), check_split("test"), 0, number, loss_on)

    def instances(self, split: str, seed: int, w: int, seq_len: int) -> list[Placed]:
        """The complete documents of window w."""
        rows = self.windows(split, seed, w, 2, seq_len=seq_len)
        ends = np.flatnonzero(np.diff(rows.doc_ids[0])) + 1
        bounds = [0, *ends.tolist(), *([seq_len] if rows.input_ids[1, 0] == BOS else [])]  # else the last one continues
        return [
            Placed(a, b, self.read(rows.input_ids[0, a:b]))
            for a, b in pairwise(bounds)
            if rows.input_ids[0, a] == BOS and rows.labels[0, a] != IGNORE
        ]

    # -- for evaluations ----------------------------------------------------------------------------------------------

    def test_batch(self, seed: int, first: int, count: int, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, roles int8), [count, longest]: the biographies of people first … first + count - 1, of the N
        people, in the texts of a split. Row r is `sample(split, seed, first + r)`.

        Roles: 1 the full name at its first mention, 2 the first pronoun, 3 the six values, 0 anything else, -1 padding
        (id 0) after the text.
        """
        if check_count("first", first) + check_count("count", count) > self.spec.N:
            raise expected("count", f"at most {max(0, self.spec.N - first)} people from number {first} on", count)
        return self._batch(check_count("seed", seed), np.arange(first, first + count), split)

    def sample_rows(self, split: str, seed: int, start: int, count: int, *, loss_on: str | None = None) -> Rows:
        if self.spec.rewrites is not None:  # their values may touch or overlap
            return super().sample_rows(split, seed, start, count, loss_on=loss_on)
        seed, number = check_count("seed", seed), check_split(split)
        passes, people = np.divmod(np.arange(start, start + count), self.spec.N)
        parts = [
            self._stream.documents(seed, number, _text_number(self.spec, number, e), people[passes == e], self.max_len)
            for e in np.unique(passes).tolist()
        ]
        ids, roles, lengths = map(np.concatenate, zip(*parts, strict=True))
        values = np.maximum(roles - (OF_VALUE - 1), 0)
        return by_answer(self, ids, np.where(values, ids, IGNORE), values, lengths, loss_on)

    def question_batch(self, seed: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, roles) as in `test_batch`, for questions that do not occur in training: row r is about attribute
        (first + r) % 6 of the held-out person number (first + r) // 6, modulo their number."""
        if not self.spec.questions:
            raise self.spec.refuse("questions", "true, for a training that has questions", False)
        numbers = np.arange(check_count("first", first), first + check_count("count", count))
        held_out = self.spec.N - self.asked_in_training
        people = self.asked_in_training + numbers // 6 % held_out
        return self._batch(check_count("seed", seed), self._question_number(people, numbers % 6))

    def explain(self, sample: Sample, query: Query) -> str:
        attribute = str(next(iter(query.slice.values())))
        facts = sample.meta
        value = facts["answer"] if "question" in facts else facts[attribute]
        if attribute == "company city" and "company" in facts:
            return f"{facts['name']} works for {facts['company']}, which is in {value}"
        return f"{facts['name']}: {attribute} {value}, in every text"

    # -- internals ----------------------------------------------------------------------------------------------------

    def _padded(self, vocab: TextVocab) -> TextVocab:
        if (size := self.spec.vocab_size) is None:
            return vocab
        if size < len(vocab):
            raise self.spec.refuse("vocab_size", f"at least the {len(vocab)} tokens that occur", size)
        return TextVocab(vocab.tokenizer, vocab.ids_of, unused=size - len(vocab))

    def _question_number(self, person: Any, a: Any) -> Any:
        return self.spec.N + 6 * person + a

    def _sample(self, seed: int, split: int, text: int, number: int, loss_on: str | None) -> Sample:
        ids, _, (length,) = self._stream.documents(seed, split, text, np.array([number]), self.max_len)
        return self.read(ids[0, :length], loss_on=loss_on)

    def _batch(self, seed: int, numbers: np.ndarray, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        ids, roles, lengths = self._stream.documents(seed, check_split(split), 0, numbers, self.max_len)
        longest = lengths.max(initial=0)
        return ids[:, :longest], np.minimum(roles[:, :longest], OF_VALUE)

    def _read(self, tokens: list[int]) -> tuple[dict[str, Any], tuple[Query, ...]]:
        return self._reader.read(tokens)


@lru_cache(maxsize=8)
def _stream(spec: Capo.Spec) -> Stream:
    """One stream per process for all tasks with these settings: counting the tokens of many passes takes seconds."""
    text = tokenise(spec.tokenizer, spec.pools)
    documents = spec.N + (6 * (spec.N // 2) if spec.questions else 0)
    settings = TextSettings(text.pieces, text.pools.sizes, spec.N, documents, spec.permute, spec.fullname)
    return Stream(settings, spec.exposures, partial(_text_number, spec))


def _text_number(spec: Capo.Spec, split: int, e: int) -> int:
    """The text number of pass e of a split; splits share no texts."""
    if split != TRAIN or spec.variant == "fresh" or spec.rewrites:
        return e
    return e % spec.texts if spec.variant == "multi" else 0

"""What every task is: `sample` draws, `windows` packs for training, `grade` judges, `show` lets people read."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from canonlm import outside
from canonlm.errors import expected, unknown
from canonlm.tasks.describe import Measure, Scale, Score
from canonlm.tasks.packing import IGNORE, Windows, empty_windows, python_loop, rng_of
from canonlm.tasks.random import TEST, check_count, check_split, stream
from canonlm.tasks.spec import TaskSpec

Slice = dict[str, int | str]
LONGEST_SHOWN = 60  # characters of a setting in a task's repr: a setting can be a whole grammar


@dataclass(frozen=True)
class Query:
    """One graded answer: tokens[start:stop], without its marker. tokens[asked:start] put the question (-1: nothing).

    slice: where the answer counts. Its first key is the task's own scale of difficulty; what more there is ({"n": 70,
    "depth": 2}) is counted apart, once per key.
    """

    start: int
    stop: int
    slice: Slice
    asked: int = -1


@dataclass(frozen=True)
class Instance:
    """What `Task.draw` returns: tokens (names of the vocabulary, or ids), the answers among them, and facts to read."""

    tokens: Sequence[str | int] | np.ndarray
    queries: Sequence[Query]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sample:
    """One instance, int32 arrays: labels[i] is the target for tokens[i], or -100 (the model shifts)."""

    tokens: np.ndarray
    labels: np.ndarray
    meta: dict[str, Any]  # facts to read (n, words, …) and `queries`

    @property
    def queries(self) -> tuple[Query, ...]:
        return self.meta["queries"]


@dataclass(frozen=True)
class Verdict:
    """The judgement of one query; `why` is "" when correct, otherwise what was said and what is right."""

    correct: bool
    slice: Slice
    why: str


class Placed(NamedTuple):
    """A complete instance of a window, at row[start:stop]."""

    start: int
    stop: int
    sample: Sample


class Vocab:
    """The tokens in order: names for people, ids for models. `markers` structure a sample, the others carry content."""

    def __init__(self, names: Iterable[str], markers: Iterable[str] = ()) -> None:
        self.names = tuple(names)
        self.ids = {name: i for i, name in enumerate(self.names)}
        assert len(self.ids) == len(self.names), "token names repeat"
        self.markers = frozenset(self.ids[name] for name in markers)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, token: object) -> str:
        """The token's name, also for what is none: <99999>, <-1>, <None>."""
        if isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < len(self.names):
            return self.names[int(token)]
        try:
            shown = repr(token)[1:-1] if isinstance(token, str) else str(token)  # a line break must not break the line
        except Exception:  # an integer too long to be written, lists too deep, an object of somebody else
            shown = type(token).__name__
        return f"<{shown if len(shown) <= LONGEST_SHOWN else f'{shown[:LONGEST_SHOWN]}…'}>"

    def text(self, tokens: Iterable[object]) -> str:
        return " ".join(map(self.name, tokens))

    def show(self, sample: Sample) -> str:
        """The sample as one readable line."""
        return self.text(sample.tokens.tolist())


class Malformed(ValueError):
    """A token sequence that is no sample of the task."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(f"position {position}: {what}")


Sampler = tuple[Callable[..., None], Any]  # a packing loop and the tables it reads: see `packing.compile_loop`


class Task:
    """Base of the tasks. A subclass has a `vocab` and a `max_len`, draws an instance, and knows its slices and chance.

    `draw` in plain Python is enough. A task that has to be fast has a compiled `sampler` and `_read` instead.
    """

    name: str  # under which `get` has it
    Spec: ClassVar[type[TaskSpec]] = TaskSpec
    difficulties: ClassVar[dict[str, dict[str, Any]]] = {}
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # by size, laid out as the files of `canonlm.recipes`
    loss_on: ClassVar[str] = "answer"  # what the task is trained on by default: "answer" or "all"
    marker_is_target: ClassVar[bool] = False  # under loss_on="answer", is the token before an answer a target too?
    evaluation: ClassVar[Any] = "windows"  # or "generate", or a class: see `canonlm.evals`
    can_isolate: ClassVar[bool] = True  # False: the start of the next instance is something to predict

    about: ClassVar[str] = ""  # for the report: what the model has to do, in a sentence or two
    scales: ClassVar[dict[str, Scale]] = {}  # by the keys of its slices
    measures: ClassVar[dict[str, Measure]] = {}  # what its evaluation finds beside accuracies
    score: ClassVar[Score] = Score()

    spec: Any  # the subclass's Spec
    vocab: Vocab
    max_len: int  # no instance is longer (tokens)
    original_ids: np.ndarray | None = None  # [len(vocab)], the ids of the original release, where it has the task

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__name__
        if "Spec" not in vars(cls):  # its errors begin with the name of its own task
            cls.Spec = type("Spec", (cls.Spec,), {"__module__": cls.__module__})
        cls.Spec.task = cls.__name__

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    # -- what a subclass writes ---------------------------------------------------------------------------------------

    def draw(self, rng: Random, test: bool) -> Instance:
        """One instance, for tests or for training; all randomness comes from `rng`."""
        raise NotImplementedError

    def sampler(self, test: bool) -> Sampler:
        """The fast way instead of `draw`: the packing loop around a compiled function, and the tables it reads."""
        return python_loop, (self, test)

    def _read(self, tokens: list[int]) -> tuple[dict[str, Any], tuple[Query, ...]]:
        """(facts, queries) of a token sequence; raises Malformed where it is no sample of this task. With `sampler`."""
        raise ValueError(f"{self.name}: samples of this task cannot be read back from their tokens")

    def slices(self) -> list[Slice]:
        """The slices of the test samples, in order."""
        raise NotImplementedError

    def chance(self, slice: Slice) -> float:
        """The score of the best guess that does not do the task, on test samples."""
        raise NotImplementedError

    def explain(self, sample: Sample, query: Query) -> str:
        """Why the answer to this query is right, in one line for people ("" where there is nothing to say)."""
        return ""

    def training_windows(self, seed: int, seq_len: int) -> int | None:
        """How many windows the training stream has; None where it never ends."""
        return None

    @property
    def least_seq_len(self) -> int:
        """The shortest window that an evaluation can do with. Of packed windows, only what is complete is graded: with
        shorter ones a test would miss the long instances, or be empty."""
        return self.max_len if self.evaluation == "windows" else 1

    # -- what everybody uses ------------------------------------------------------------------------------------------

    def windows(
        self, split: str, seed: int, start: int, count: int, *, seq_len: int, loss_on: str | None = None
    ) -> Windows:
        """Windows start … start + count - 1 of the stream (seed, split).

        "train" and "valid" have one distribution of samples, "test" its own. loss_on: "answer", "all", or None for what
        the paper does. A window does not depend on the windows before it, nor on start and count.
        """
        loss_on_all = self._loss_on(loss_on) == "all"
        out = empty_windows(check_count("count", count), check_count("seq_len", seq_len, least=1))
        key = check_count("seed", seed), check_split(split), check_count("start", start)
        self._fill(*key, 0, loss_on_all, out)
        return out

    def _fill(self, seed: int, split: int, start: int, first: int, loss_on_all: bool, out: Windows) -> None:
        """Windows start, start + 1, …, each with its instances first, first + 1, …"""
        loop, tables = self.sampler(split == TEST)
        loop(seed, split, start, first, loss_on_all, tables, self.max_len, *out)

    def sample(self, split: str, seed: int, index: int, j: int = 0, *, loss_on: str | None = None) -> Sample:
        """Instance j of window `index`, whole."""
        keep = self._loss_on(loss_on)
        key = check_count("seed", seed), check_split(split), check_count("index", index), check_count("j", j)
        if self.draws_in_python:
            state, gamma = stream(*key)
            return self.draw_sample(state, gamma, split == "test", keep)
        row = empty_windows(1, self.max_len)
        self._fill(*key, False, row)
        return self.read(row.input_ids[0, row.doc_ids[0] == 0], loss_on=keep)

    @property
    def draws_in_python(self) -> bool:
        """Is there no compiled sampler, only `draw`?"""
        return type(self).sampler is Task.sampler

    def draw_sample(self, state: int, gamma: int, test: bool, loss_on: str) -> Sample:
        """What `draw` returns, checked. ValueError: it does not fit to `vocab` or `max_len`."""
        drawn = self.draw(rng_of(state, gamma), test)
        key, names = f"{self.name}: draw", self.vocab.ids
        tokens = [names.get(token, -1) if isinstance(token, str) else operator.index(token) for token in drawn.tokens]
        for token, id in zip(drawn.tokens, tokens, strict=True):
            if not 0 <= id < len(self.vocab):
                raise expected(key, f"names or ids of the {len(self.vocab)} tokens of the vocabulary", token)
        if not 0 < len(tokens) <= self.max_len:
            raise expected(key, f"1 to max_len = {self.max_len} tokens", len(tokens))
        for query in drawn.queries:
            if not 0 < query.start < query.stop <= len(tokens) or query.asked > query.start:
                raise expected(key, f"answers behind the first and within all {len(tokens)} tokens", query)
        return self._labelled(np.array(tokens, np.int32), drawn.facts, tuple(drawn.queries), loss_on)

    def instances(self, split: str, seed: int, w: int, seq_len: int) -> list[Placed]:
        """The complete instances of window w, in order (a cut one at the end is left out)."""
        placed: list[Placed] = []
        start = 0
        while (stop := start + len((sample := self.sample(split, seed, w, len(placed))).tokens)) <= seq_len:
            placed.append(Placed(start, stop, sample))
            start = stop
        return placed

    def read(self, tokens: Sequence[int] | np.ndarray, *, loss_on: str | None = None) -> Sample:
        """The Sample that these tokens (this task's own ids) spell. ValueError says where they spell none."""
        ids = _ids(tokens)
        return self._labelled(ids, *self._read(ids.tolist()), self._loss_on(loss_on))

    def _labelled(self, ids: np.ndarray, facts: Mapping[str, Any], queries: tuple[Query, ...], loss_on: str) -> Sample:
        labels = ids.copy()
        if loss_on == "answer":
            labels[:] = IGNORE
            for query in queries:
                target = slice(query.start - self.marker_is_target, query.stop)
                labels[target] = ids[target]
        return Sample(ids, labels, {**facts, "queries": queries})

    def grade(self, sample: Sample, output: Any) -> list[Verdict]:
        """One verdict per query; a malformed output is a wrong answer, never an exception.

        output is one of: a sequence as long as sample.tokens (what the model wrote at each position; only the answers'
        positions are read); a list with one sequence per query; any other flat sequence: the answer to the first query
        and to those that start where it does. There is no end token: what follows a complete answer is not read.
        """
        answers = _answers(sample, output)
        return [self._judge(sample, query, said) for query, said in zip(sample.queries, answers, strict=True)]

    def _judge(self, sample: Sample, query: Query, said: list[Any] | None) -> Verdict:
        right = sample.tokens[query.start : query.stop].tolist()
        said = (said or [])[: len(right)]
        if said == right and not any(isinstance(token, bool | float) for token in said):
            return Verdict(True, query.slice, "")
        heard = f"said '{self.vocab.text(said)}'" if said else "said nothing"
        return Verdict(False, query.slice, f"{heard}, is '{self.vocab.text(right)}'")

    def show(self, sample: Sample) -> list[tuple[str, str]]:
        """(token name, role) for every token; roles: marker, context, question, answer."""
        roles = ["context"] * len(sample.tokens)
        for query in sample.queries:
            asked = query.start if query.asked < 0 else query.asked
            roles[asked : query.start] = ["question"] * (query.start - asked)
            roles[query.start : query.stop] = ["answer"] * (query.stop - query.start)
        tokens = sample.tokens.tolist()
        roles = ["marker" if token in self.vocab.markers else role for token, role in zip(tokens, roles, strict=True)]
        return list(zip(map(self.vocab.name, tokens), roles, strict=True))

    def to_original(self, sample: Sample) -> list[int]:
        """The sample in the ids of the original release."""
        return self._originals()[sample.tokens].tolist()

    def from_original(self, ids: Sequence[int] | np.ndarray) -> Sample:
        """The sample that these ids of the original release spell. ValueError says where they spell none."""
        ours = {int(original): i for i, original in enumerate(self._originals())}
        tokens = []
        for position, original in enumerate(_ids(ids).tolist()):
            if original not in ours:
                raise Malformed(position, f"{original} is no token of {self}")
            tokens.append(ours[original])
        return self.read(tokens)

    def _originals(self) -> np.ndarray:
        if self.original_ids is None:
            raise ValueError(f"{self.name}: the original release has no token ids of this task")
        return self.original_ids

    def _loss_on(self, loss_on: str | None) -> str:
        if loss_on not in (None, "answer", "all"):
            raise expected("loss_on", '"answer" or "all"', loss_on)
        return loss_on or self.loss_on

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={_brief(value)}' for key, value in self.spec.model_dump().items())})"


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"


def _ids(tokens: Any) -> np.ndarray:
    """int32 [n]; ValueError for what is no sequence of integers."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise expected("tokens", "a sequence of integers", tokens)
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise expected("tokens", "integers of 32 bits", int(ids[np.abs(ids.astype(object)).argmax()]))
    return ids.astype(np.int32)


def _answers(sample: Sample, output: Any) -> list[list[Any] | None]:
    """What the output says to each query, as plain lists; None where it says nothing."""
    queries = sample.queries
    output = _plain(output)
    if output is None or len(output) == 0:
        return [None] * len(queries)
    nested = [_plain(part) for part in output]
    if any(part is not None for part in nested):
        return [*nested[: len(queries)], *[None] * (len(queries) - len(nested))]
    if len(output) == len(sample.tokens):
        return [output[query.start : query.stop] for query in queries]
    return [output if query.start == queries[0].start else None for query in queries]


def _plain(sequence: Any) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else."""
    sequence = sequence.tolist() if hasattr(sequence, "tolist") else sequence
    if not isinstance(sequence, list | tuple):
        return None
    return [part.tolist() if hasattr(part, "tolist") else part for part in sequence]


# -- the registry -----------------------------------------------------------------------------------------------------

_TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def register(name: str) -> Callable[[T], T]:
    """Class decorator: the task can be had as `get(name)`."""

    def add(cls: T) -> T:
        cls.name = cls.Spec.task = name
        _TASKS[name] = cls
        return cls

    return add


def names() -> list[str]:
    return sorted(_TASKS)


def registered(name: str) -> type[Task]:
    """The class of one of our tasks; of any other name `Task` itself, which has no words. Opens no file of a user's."""
    return _TASKS.get(name, Task)


def find(name: str) -> type[Task]:
    """The class of a task: `depo`, `mine.py:Parity` or `package.module:Parity`. ValueError where there is none."""
    if name in _TASKS:
        return _TASKS[name]
    if not outside.is_reference(name):
        raise unknown("task", name, _TASKS)
    cls = outside.load(name).object
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise expected("task", "the name of a class that is a canonlm.tasks.Task", name)
    return cls


def get(name: str, *, difficulty: str | None = None, **spec: Any) -> Task:
    """`get("depo", difficulty="depo1-225", M=5)`: a named setting, single settings, both, or the defaults.

    `get("mine.py:Parity", length=9)`: a task of your own, from a file or an installed package (`canonlm.outside`).
    """
    cls = find(name)
    if difficulty is not None and difficulty not in cls.difficulties:
        raise unknown(f"{name} difficulty", difficulty, cls.difficulties, f"{name} difficulties")
    named = cls.difficulties[difficulty] if difficulty is not None else {}
    task = cls(cls.Spec(**{**named, **spec}))
    task.name = name
    return task

"""The interface of tasks: `sample` draws, `windows` packs for training, `grade` checks answers, `show` prints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from canonlm.core import user_code
from canonlm.core.errors import expected, unknown
from canonlm.tasks.describe import Measure, Scale, Score
from canonlm.tasks.packing import IGNORE, Windows, empty_windows, python_loop, rng_of
from canonlm.tasks.random import GRADED, check_count, check_split, stream
from canonlm.tasks.records import (
    LONGEST_SHOWN,
    Drawn,
    Instance,
    Malformed,
    Placed,
    Query,
    Sample,
    Slice,
    Verdict,
    Vocab,
    as_instance,
    plain_slice,
    token_id,
)
from canonlm.tasks.rows import Rows, by_label, by_sample
from canonlm.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from canonlm.core.window_dataset import WindowDataset

Sampler = tuple[Callable[..., None], Any]  # a packing loop and the tables it reads: see `packing.compile_loop`


class Task:
    """Base of all tasks. A subclass sets `vocab` and `max_len`, draws instances, and defines their slices and chance.

    A `draw` in plain Python is enough. A task that must be fast defines a compiled `sampler` and `_read` instead.
    """

    name: str  # the name that `get` takes
    Spec: ClassVar[type[TaskSpec]] = TaskSpec
    difficulties: ClassVar[dict[str, dict[str, Any]]] = {}
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # by size, in the format of the files of `canonlm.launch.recipes`
    loss_on: ClassVar[str] = "answer"  # the default targets of training: "answer" or "all"
    marker_is_target: ClassVar[bool] = False  # True: under loss_on="answer", the token before an answer is a target too
    separate_answers: bool = True  # False: an answer may start where another one ends
    evaluation: ClassVar[Any] = "windows"  # or "generate", or a class: see `canonlm.train.evals`
    tests_what_it_trained_on: ClassVar[bool] = False  # True: a test must use the seed of the training data
    can_isolate: ClassVar[bool] = True  # False: the model must predict the start of the next instance

    about: ClassVar[str] = ""  # for the report: what the model has to do, in a sentence or two
    scales: ClassVar[dict[str, Scale]] = {}  # by the keys of its slices
    measures: ClassVar[dict[str, Measure]] = {}  # results of its evaluation other than accuracies
    score: ClassVar[Score] = Score()

    spec: Any  # the subclass's Spec
    vocab: Vocab
    max_len: int  # no instance is longer (tokens)
    original_ids: np.ndarray | None = None  # [len(vocab)], the ids of the original release, if it has the task

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__name__
        if "Spec" not in vars(cls):  # a class per task, since errors begin with the task's name
            cls.Spec = type(
                "Spec", (cls.Spec,), {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Spec"}
            )
        cls.Spec.task = cls.__name__

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    # -- what a subclass defines --------------------------------------------------------------------------------------

    def draw(self, rng: Random, test: bool) -> Drawn:
        """Draw one instance, for tests or for training: an `Instance`, or its tokens with `Answer`s among them.

        All randomness comes from `rng`."""
        raise NotImplementedError

    def sampler(self, test: bool) -> Sampler:
        """The fast alternative to `draw`: the packing loop around a compiled function, and the tables it reads."""
        return python_loop, (self, test)

    def _read(self, tokens: list[int]) -> tuple[dict[str, Any], tuple[Query, ...]]:
        """(facts, queries) of a sample's tokens. Raises Malformed for other sequences. Required with `sampler`."""
        raise ValueError(f"{self.name}: samples of this task cannot be read back from their tokens")

    def slices(self) -> list[Slice]:
        """The slices of the test samples, in order."""
        raise NotImplementedError

    def chance(self, slice: Slice) -> float:
        """The score of a good guess that does not do the task but sees the sample, on test samples."""
        raise NotImplementedError

    def explain(self, sample: Sample, query: Query) -> str:
        """Why the answer to this query is right, in one line for people; "" if there is nothing to explain."""
        return ""

    def training_windows(self, seed: int, seq_len: int) -> int | None:
        """The number of windows in the training stream; None if it never ends."""
        return None

    def has_windows(self, seed: int, seq_len: int, count: int) -> bool:
        """Whether the training stream has this many windows. Override it where counting all of them takes long."""
        windows = self.training_windows(seed, seq_len)
        return windows is None or count <= windows

    @property
    def files(self) -> list[Path]:
        """The user's files that samples depend on. A run notes their sha256, and does not go on with other contents."""
        return []

    @property
    def min_seq_len(self) -> int:
        """The shortest window that an evaluation can use. Only complete instances of packed windows are graded, so
        with shorter windows a test would miss the long instances, or be empty."""
        return self.max_len if self.in_windows else 1

    @property
    def in_windows(self) -> bool:
        """Whether its evaluation grades the instances of packed windows; otherwise every question stands alone."""
        return self.evaluation == "windows"

    # -- what users call ----------------------------------------------------------------------------------------------

    def windows(
        self, split: str, seed: int, start: int, count: int, *, seq_len: int, loss_on: str | None = None
    ) -> Windows:
        """Windows start … start + count - 1 of the stream (seed, split).

        "train" and "valid" have one distribution of samples, "test" and "validation" another. loss_on: "answer", "all",
        or None for the task's default. A window depends neither on the windows before it nor on start and count.
        """
        loss_on_all = self._loss_on(loss_on) == "all"
        out = empty_windows(check_count("count", count), check_count("seq_len", seq_len, min=1))
        key = check_count("seed", seed), check_split(split), check_count("start", start)
        self._fill(*key, 0, loss_on_all, out)
        return out

    def _fill(self, seed: int, split: int, start: int, first: int, loss_on_all: bool, out: Windows) -> None:
        """Write windows start, start + 1, … to `out`, each with its instances first, first + 1, …"""
        loop, tables = self.sampler(split in GRADED)
        loop(seed, split, start, first, loss_on_all, tables, self.max_len, *out)

    def dataset(
        self,
        split: str,
        seed: int,
        seq_len: int,
        count: int,
        *,
        loss_on: str | None = None,
        shifted: bool = False,
        isolate_documents: bool = False,
    ) -> "WindowDataset":
        """Windows 0 … count - 1 as a map-style torch dataset: the windows that a canonlm run reads.

        An item is a dict of int64 tensors [seq_len]: `input_ids`, `labels`, and with isolate_documents `position_ids`.
        It depends on (split, seed, index) alone, so any order, any number of workers and resuming anywhere are fine. A
        worker that is a new process ("spawn") runs the file of a task from outside again.

        shifted: False: labels[t] is input_ids[t], or -100 outside the loss; models of transformers shift the labels.
            True: labels[t] is the target of position t, for `cross_entropy(logits[t], labels[t])`.
        isolate_documents: `position_ids` restart at every instance, and the first token of an instance is not a target.

        Raises ValueError for an unknown split or loss_on, for a negative number, and for more windows than the training
        stream has (Capo's is finite).
        """
        from canonlm.core.window_dataset import WindowDataset

        return WindowDataset(
            self, split, seed, seq_len, count, loss_on=loss_on, shifted=shifted, isolate_documents=isolate_documents
        )

    def sample(self, split: str, seed: int, index: int, j: int = 0, *, loss_on: str | None = None) -> Sample:
        """Instance j of window `index`, never cut."""
        keep = self._loss_on(loss_on)
        key = check_count("seed", seed), check_split(split), check_count("index", index), check_count("j", j)
        if self.draws_in_python:
            state, gamma = stream(*key)
            return self.draw_sample(state, gamma, key[1] in GRADED, keep)
        row = empty_windows(1, self.max_len)
        self._fill(*key, False, row)
        return self.read(row.input_ids[0, row.doc_ids[0] == 0], loss_on=keep)

    def sample_rows(self, split: str, seed: int, start: int, count: int, *, loss_on: str | None = None) -> Rows:
        """`sample(split, seed, index)` for index = start … start + count - 1, as columns of numbers."""
        # If a task has an evaluation of its own, its windows are not plain packing, or not all answers are labelled.
        plain = self.evaluation in ("windows", "generate") and self.separate_answers
        draw = by_label if plain and not self.draws_in_python else by_sample
        return draw(self, split, seed, start, count, loss_on)

    @property
    def draws_in_python(self) -> bool:
        """Whether the task has only `draw`, and no compiled sampler."""
        return type(self).sampler is Task.sampler

    def draw_sample(self, state: int, gamma: int, test: bool, loss_on: str) -> Sample:
        """The checked result of `draw`. ValueError if it does not fit `vocab` or `max_len`."""
        key, names = f"{self.name}: draw", self.vocab.ids
        if not isinstance(raw := self.draw(rng_of(state, gamma), test), Instance | Iterable):
            raise expected(key, "tokens with Answers, or an Instance", raw)
        drawn = as_instance(raw)
        tokens = [names.get(token, -1) if isinstance(token, str) else token_id(token) for token in drawn.tokens]
        for token, id in zip(drawn.tokens, tokens, strict=True):
            if not 0 <= id < len(self.vocab):
                raise expected(key, f"names or ids of the {len(self.vocab)} tokens of the vocabulary", token)
        if not 0 < len(tokens) <= self.max_len:
            raise expected(key, f"1 to max_len = {self.max_len} tokens", len(tokens))
        for query in drawn.queries:
            if not 0 < query.start < query.stop <= len(tokens) or query.question_start > query.start:
                raise expected(key, f"answers after the first and within all {len(tokens)} tokens", query)
        queries = tuple(replace(query, slice=plain_slice(query.slice)) for query in drawn.queries)
        for query in queries:
            if not all(isinstance(value, int | float | str) for value in query.slice.values()):
                raise expected(key, "numbers or texts in a slice", query.slice)
        return self._labelled(np.array(tokens, np.int32), drawn.facts, queries, loss_on)

    def instances(self, split: str, seed: int, w: int, seq_len: int) -> list[Placed]:
        """The complete instances of window w, in order. An instance cut at the window's end is left out."""
        placed: list[Placed] = []
        start = 0
        while (stop := start + len((sample := self.sample(split, seed, w, len(placed))).tokens)) <= seq_len:
            placed.append(Placed(start, stop, sample))
            start = stop
        return placed

    def read(self, tokens: Sequence[int] | np.ndarray, *, loss_on: str | None = None) -> Sample:
        """The Sample with these tokens (ids of this task). ValueError, with the position, if they are not one."""
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

        output is one of: a sequence as long as sample.tokens (the model's token at each position; only the positions of
        answers are read); a list with one sequence per query; any other flat sequence: the answer to the first query
        and to those that start where it does. There is no end token: what follows a complete answer is not read. (In
        recall and dictionary, no further value may follow.)
        """
        answers = _answers(sample, output)
        return [self._judge(sample, query, answer) for query, answer in zip(sample.queries, answers, strict=True)]

    def _judge(self, sample: Sample, query: Query, answer: list[Any] | None) -> Verdict:
        expected_answer = sample.labels[query.start : query.stop].tolist()
        answer = self._complete(answer or [], len(expected_answer))
        if [token_id(token) for token in answer] == expected_answer:
            return Verdict(True, query.slice, "")
        got = f"'{self.vocab.text(answer)}'" if answer else "nothing"
        return Verdict(False, query.slice, f"expected '{self.vocab.text(expected_answer)}', got {got}")

    def _complete(self, answer: list[Any], length: int) -> list[Any]:
        """The part of an answer that is read, where the right one has this many tokens."""
        return answer[:length]

    def show(self, sample: Sample) -> list[tuple[str, str]]:
        """(token name, role) for every token; roles: marker, context, question, answer."""
        roles = ["context"] * len(sample.tokens)
        for query in sample.queries:
            begin = query.start if query.question_start < 0 else query.question_start
            roles[begin : query.start] = ["question"] * (query.start - begin)
            roles[query.start : query.stop] = ["answer"] * (query.stop - query.start)
        tokens = sample.tokens.tolist()
        roles = ["marker" if token in self.vocab.markers else role for token, role in zip(tokens, roles, strict=True)]
        return list(zip(map(self.vocab.name, tokens), roles, strict=True))

    def to_original(self, sample: Sample) -> list[int]:
        """The sample in the ids of the original release."""
        return self._originals()[sample.tokens].tolist()

    def from_original(self, ids: Sequence[int] | np.ndarray) -> Sample:
        """The Sample with these ids of the original release. ValueError, with the position, if they are not one."""
        return self.read(self._from_original(ids))

    def _from_original(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        ours = {int(original): i for i, original in enumerate(self._originals())}
        for position, original in enumerate(originals := _ids(ids).tolist()):
            if original not in ours:
                raise Malformed(position, f"{original} is not a token of {self}")
        return [ours[original] for original in originals]

    def _originals(self) -> np.ndarray:
        if self.original_ids is None:
            raise ValueError(f"{self.name}: the original release has no token ids for this task")
        return self.original_ids

    def _loss_on(self, loss_on: str | None) -> str:
        if (chosen := self.loss_on if loss_on is None else loss_on) not in ("answer", "all"):
            raise expected("loss_on", '"answer" or "all"', chosen)
        return chosen

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A class from a user's file cannot be imported: another process runs the unchanged file again."""
        cls = type(self)
        if (file := user_code.file_of(cls)) is None:
            return super().__reduce_ex__(protocol)
        return _blank, (str(file), cls.__module__, cls.__qualname__), vars(self)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={_brief(value)}' for key, value in self.spec.model_dump().items())})"


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"


def _ids(tokens: Any) -> np.ndarray:
    """The tokens as int32 [n]; ValueError unless they are a sequence of integers."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise expected("tokens", "a sequence of integers", tokens)
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise expected("tokens", "32-bit integers", int(ids[np.abs(ids.astype(object)).argmax()]))
    return ids.astype(np.int32)


def _answers(sample: Sample, output: Any) -> list[list[Any] | None]:
    """The answer to each query as a plain list; None if the output has none."""
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
    """Class decorator that registers a task under the name that `get` takes. ValueError for the name of a built-in
    task."""

    def add(cls: T) -> T:
        module = registered(name).__module__
        if module not in (Task.__module__, cls.__module__) and module.startswith(f"{__package__}."):
            raise expected("register", "a name that no built-in task has", name)
        cls.name = cls.Spec.task = name
        _TASKS[name] = cls
        return cls

    return add


def names() -> list[str]:
    return sorted(_TASKS)


def registered(name: str) -> type[Task]:
    """The class of a built-in task; for any other name `Task` itself. Never opens a user's file."""
    return _TASKS.get(name, Task)


def find(name: str) -> type[Task]:
    """The class of a task: `depo`, `mine.py:Parity` or `package.module:Parity`. ValueError if there is none."""
    if name in _TASKS:
        return _TASKS[name]
    if not user_code.is_reference(name):
        raise unknown("task", name, _TASKS)
    cls = user_code.load(name).object
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise expected("task", "the name of a class that is a canonlm.tasks.Task", name)
    return cls


def get(name: str, *, difficulty: str | None = None, **spec: Any) -> Task:
    """Make a task: `get("depo", difficulty="depo1-225", M=5)`. The difficulty and single settings are optional.

    `get("mine.py:Parity", length=9)` makes a task of yours, from a file or an installed package.
    """
    cls = find(name)
    if difficulty is not None and difficulty not in cls.difficulties:
        raise unknown(f"{name} difficulty", difficulty, cls.difficulties, f"{name} difficulties")
    named = cls.difficulties[difficulty] if difficulty is not None else {}
    task = cls(cls.Spec(**{**named, **spec}))
    task.name = name
    return task


def _blank(file: str, module: str, name: str) -> Task:
    cls = attrgetter(name)(user_code.rerun(file, module))
    return cls.__new__(cls)

"""A task as one function: `@task(vocab=…, max_len=…, chance=…)` makes a `Task` of a function that draws instances."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, get_type_hints

import numpy as np
from pydantic import create_model

from canonlm.core.errors import expected, unknown
from canonlm.tasks.base import Task
from canonlm.tasks.random import check_count
from canonlm.tasks.records import Drawn, Slice, Vocab
from canonlm.tasks.spec import TaskSpec

Values = Mapping[str, Sequence[int | str]]

SAMPLES_FOR_SLICES = 256
"""A task without `slices` has those that occur in this number of test samples."""


def task(
    *,
    vocab: Iterable[str] | Callable[[Any], Iterable[str]],
    max_len: int | Callable[[Any], int],
    chance: float | Callable[[Slice], float],
    slices: Values | Callable[[Any], Values] | None = None,
    markers: Iterable[str] = (),
    **attributes: Any,
) -> Callable[[Callable[..., Drawn]], "type[FunctionTask]"]:
    """Decorator of `draw(rng, test, *, setting=default, …)`, which returns the tokens of one instance by name, with its
    answers as `Answer`. All randomness comes from `rng`, a `random.Random`; `test` is true for test samples.

    vocab: the names of the tokens, in order. max_len: no instance is longer. Both, and slices, may be functions of the
        settings: `max_len=lambda settings: settings.bits + 3`.
    chance: the score of the best guess that does not do the task, for all slices or as a function of a slice.
    slices: the slices of its answers, such as {"bits": [4, 8]}. Default: those in the first 256 test samples.
    markers: tokens that structure a sample, for `canonlm data show`.
    attributes: class attributes of `Task`, such as loss_on="all" or evaluation="generate".

    The first paragraph of the function's docstring becomes the task's `about`. Raises ValueError for a function with
    other arguments, and for an attribute that tasks do not have.
    """
    choices = [name for name in Task.__annotations__ if hasattr(Task, name)]
    for name in attributes:
        if name not in choices:
            raise unknown("attribute of a task", name, choices, "attributes")

    names = vocab if callable(vocab) else (*vocab,)  # an iterator has them only once

    def decorate(draw: Callable[..., Drawn]) -> "type[FunctionTask]":
        about = " ".join((inspect.getdoc(draw) or "").partition("\n\n")[0].split())
        arguments = _Arguments(
            draw, _as_function(names), _as_function(max_len), _as_function(chance), _as_function(slices)
        )
        own = {"Spec": _spec_of(draw), "about": about, "__module__": draw.__module__, "__doc__": draw.__doc__}
        return type(draw.__name__, (FunctionTask,), {**own, **attributes, "_of": arguments, "_markers": (*markers,)})

    return decorate


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `@task`."""

    draw: Callable[..., Drawn]
    vocab: Callable[[Any], Iterable[str]]
    max_len: Callable[[Any], int]
    chance: Callable[[Slice], float]
    slices: Callable[[Any], Values | None]


class FunctionTask(Task):
    """Base of the classes that `@task` makes: `parity(bits=12)` is a task."""

    _of: ClassVar[_Arguments]
    _markers: ClassVar[tuple[str, ...]]

    def __init__(self, spec: Any = None, /, **settings: Any) -> None:
        self.spec = spec = self.Spec(**settings) if spec is None else spec
        self.vocab = Vocab(self._of.vocab(spec), self._markers)
        self.max_len = check_count("max_len", self._of.max_len(spec), min=1)
        self._settings = dict(spec)
        self._slices: list[Slice] | None = None

    def draw(self, rng: Random, test: bool) -> Drawn:
        return self._of.draw(rng, test, **self._settings)

    def slices(self) -> list[Slice]:
        if self._slices is None:
            named = self._of.slices(self.spec)
            if named is None:
                self._slices = self._slices_of_samples()
            elif isinstance(named, Mapping) and all(np.ndim(values) == 1 for values in named.values()):
                self._slices = [{key: v} for key in named for v in named[key]]
            else:
                raise expected(f"{self.name}: slices", "a list of values for each name", named)
        return [*self._slices]

    def chance(self, slice: Slice) -> float:
        return self._of.chance(slice)

    def _slices_of_samples(self) -> list[Slice]:
        values: dict[str, set[int | str]] = {}
        unsliced = False
        for index in range(SAMPLES_FOR_SLICES):
            for query in self.sample("test", 0, index).queries:
                unsliced = unsliced or not query.slice
                for key, value in query.slice.items():
                    values.setdefault(key, set()).add(value)
        named = [{key: v} for key, all_ in values.items() for v in sorted(all_, key=lambda v: (isinstance(v, str), v))]
        return [*named, {}] if unsliced else named


def _as_function(value: Any) -> Callable[[Any], Any]:
    return value if callable(value) else lambda _: value


def _spec_of(draw: Callable[..., Drawn]) -> type[TaskSpec]:
    """The keyword arguments of a function as settings, with their defaults and, if annotated, their types."""
    hints = get_type_hints(draw, include_extras=True)
    fields: dict[str, Any] = {}
    positional = []
    for name, parameter in inspect.signature(draw).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(str(parameter))
        elif parameter.default is parameter.empty:
            raise expected(f"{draw.__name__}: {name}", "a setting with a default", str(parameter))
        elif name.startswith("model_") and hasattr(TaskSpec, name):  # of pydantic
            raise expected(name, "a setting with another name", name)
        else:
            fields[name] = (hints.get(name, type(parameter.default)), parameter.default)
    if len(positional) != 2 or any(name.startswith("*") for name in positional):
        what = "the arguments (rng, test), or (rng, test, *, setting=default)"
        raise expected(draw.__name__, what, f"({', '.join(positional)})")
    return create_model(f"{draw.__name__}.Spec", __base__=TaskSpec, __module__=draw.__module__, **fields)

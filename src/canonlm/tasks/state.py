"""State: the product of elements of a group, a word. Measures state tracking over the number of elements n.

    bos  x_1 … x_n  ans  y                answers=end: y is the product x_1 x_2 … x_n
    bos  x_1 … x_n  ans                   answers=every: after each x_i, the target is the product x_1 … x_i

The state is an element of the group, and every token moves it. The task of Merrill, Petty and Sabharwal (The illusion
of state in state-space models, arXiv 2404.08819).
"""

from typing import Literal

import numpy as np
from pydantic import model_validator

from canonlm.tasks.base import Query, Sample, Slice, Vocab, register
from canonlm.tasks.describe import Scale, counted
from canonlm.tasks.groups import group, problem
from canonlm.tasks.words import FIRST, Words, WordsSpec


@register("state")
class State(Words):
    """The product of n random elements of a group. Loss on the answers."""

    class Spec(WordsSpec):
        group: str = "S5"  # `canonlm.tasks.groups`: Z2 … Z60, D3 …, S3 …, A4 …, and products such as A5xZ2
        inputs: Literal["all", "generators"] = "all"  # words of all elements, or of the identity and some generators

        @model_validator(mode="after")
        def _known_group(self) -> "State.Spec":
            if what := problem(self.group):
                raise self.refuse("group", what, self.group)
            return self

    difficulties = {f"state-{name.lower()}": {"group": name} for name in ("S3", "Z60", "A4xZ5", "A5", "S5")}
    about = "The model reads elements of a group, such as permutations of five things, and must give their product."
    scales = {"n": Scale("number of elements", counted("element"), trained="N")}
    an_input, the_answer, states_are = "an element", "the product", "products"

    def __init__(self, spec: Spec) -> None:
        self.group = group(spec.group)
        elements = range(self.group.order)
        vocab = Vocab(["bos", "ans", *(f"g{i}" for i in elements)], ["bos", "ans"])
        inputs = [*elements] if spec.inputs == "all" else [0, *self.group.generators]
        super().__init__(spec, vocab, inputs, self.group.table, FIRST + np.arange(self.group.order))

    def chance(self, slice: Slice) -> float:
        """The likeliest product of n elements. With all elements as inputs, every product is equally likely, even if
        all elements but one are known."""
        return 1 / self.group.order if self.spec.inputs == "all" else super().chance(slice)

    def explain(self, sample: Sample, query: Query) -> str:
        n, answer = counted("element")(str(query.slice["n"])), int(sample.labels[query.start]) - FIRST
        return f"the product of {n} is g{answer} = {self.group.cycles(answer)}"

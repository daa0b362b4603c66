"""The settings of `recall`, and which of them go together."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from canonlm.tasks.spec import Sizes, TaskSpec
from canonlm.tasks.tokens import MAX_CELLS

MAX_PAIRS = 2**12
Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[int, Field(ge=1, le=2**20)]


class RecallSpec(TaskSpec):
    """The settings of `recall`."""

    pairs: int = Field(16, ge=1, le=MAX_PAIRS)  # training: n uniform on 1..pairs; in a grid, on its squares
    train_pairs: int | None = Field(None, ge=1)  # training: n = train_pairs; None: as above
    test_pairs: Sizes = None  # test: n uniform on these; None: 4, 8, 16, … and `pairs`
    keys: Words = 64
    values: Words = 64
    noise: float = Field(0.0, ge=0, le=0.95)  # the share of the context's slots that are noise
    noise_words: int = Field(16, ge=1, le=2**16)  # two are one draw below 2**32
    space: int = Field(1, ge=1, le=64)  # slots for each question; those without one are filler
    gaps: float | None = Field(None, gt=0, le=1)  # slot i has probability ∝ i^(gaps-1); None: all alike
    filler: Literal["noise", "words"] = "noise"  # or any word except the keys of the sample
    answers: Literal["shown", "hidden"] = "shown"  # hidden: filler stands in place of the answer
    updates: Fraction = 0.0  # the share of keys that are bound again, after all others: the newest value counts
    key_length: int = Field(1, ge=1, le=8)  # tokens of a key: uniform on 1..key_length
    value_length: int = Field(1, ge=1, le=8)
    grid: bool = False  # keys are all pairs of √n first and √n second words: neither is enough
    levels: int = Field(1, ge=1, le=16)  # the value of a key is the next key, and only the last one is asked for

    @property
    def hidden(self) -> bool:
        return self.answers == "hidden"

    @property
    def some_again(self) -> bool:
        """Whether slices of the test tell keys that are bound again from the others."""
        return any(map(self.rebound, self.test_sizes()))

    def rebound(self, n: int) -> int:
        """How many of n keys are bound again."""
        return int(round(n * self.updates, 9))  # 29 of 100 with 0.29, where the product is 28.999…

    def noise_slots(self, n: int) -> int:
        bindings = n * self.levels + self.rebound(n)
        return round(bindings * self.noise / (1 - self.noise))

    def possible(self) -> range:
        keys = min(self.keys**2, MAX_PAIRS) if self.grid else _rows(self.keys, self.key_length) // self.levels
        values = _rows(self.values, self.value_length)
        largest = min(MAX_PAIRS, keys, values)
        while largest + self.rebound(largest) > values:
            largest -= 1
        return range(1, largest + 1)

    def test_sizes(self) -> list[int]:
        return self.sizes(
            "test_pairs",
            self.pairs,
            self.possible(),
            self.squares(self.pairs)[1:] or self.squares(self.pairs) or None,
        )

    def squares(self, most: int) -> list[int]:
        return [side * side for side in range(1, int(most**0.5) + 1)] if self.grid else []

    def training_sizes(self) -> list[int]:
        if self.train_pairs is not None:
            return [self.train_pairs]
        return self.squares(self.pairs) or [*range(1, self.pairs + 1)]

    @model_validator(mode="after")
    def _sensible(self) -> "RecallSpec":
        for kind, words, length in (("key", self.keys, self.key_length), ("value", self.values, self.value_length)):
            if length * words**length > MAX_CELLS:
                what = f"less, so that {kind}_length x {kind}s^{kind}_length is at most {MAX_CELLS}"
                raise self.refuse(f"{kind}_length", what, length)
        if not self.grid and _rows(self.keys, self.key_length) < self.levels:
            raise self.refuse("keys", f"at least levels ({self.levels}), as each chain has as many", self.keys)
        if not self.possible():
            raise self.refuse("values", "at least 2 with updates, as values of a sample differ", self.values)
        if self.pairs > (largest := self.possible()[-1]):
            raise self.refuse("pairs", f"at most {largest}, as there are no more keys or values", self.pairs)
        if self.train_pairs not in (None, *(self.squares(self.pairs) or range(1, self.pairs + 1))):
            what = f"an integer from 1 to pairs ({self.pairs}){', a square' if self.grid else ''}"
            raise self.refuse("train_pairs", what, self.train_pairs)
        longest = max(self.key_length, self.value_length)
        if self.grid and any(int(n**0.5) ** 2 != n for n in self.test_sizes()):
            raise self.refuse("test_pairs", "square numbers with grid=true", self.test_pairs)
        if self.levels > 1 and (self.grid or longest > 1 or self.updates):
            raise self.refuse("levels", "1 with a grid, long keys or values, or updates", self.levels)
        if self.grid and longest > 1:
            raise self.refuse("value_length, key_length", "1 with grid=true", longest)
        if longest > 1 and (self.answers, self.filler) != ("shown", "noise"):
            raise self.refuse("value_length, key_length", "1 with these answers or filler", longest)
        if self.grid and self.filler == "words":
            raise self.refuse("filler", '"noise" with grid=true', self.filler)
        return self


def _rows(words: int, length: int) -> int:
    """The number of rows of 1 to `length` words."""
    return sum(words**each for each in range(1, length + 1))

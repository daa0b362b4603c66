"""A layered context-free grammar: its rules, its files, and exact answers about its sentences.

Level 0 is the root, and the last level has the terminals 1 … T. Every symbol above them has alternatives, all equally
likely; an alternative is a row of symbols of the next level. To derive a sentence, start at the root and replace every
symbol by one of its alternatives, level after level, until only terminals are left.

Nine files of `grammars/` are the released grammars of Physics of Language Models, Part 1 (arXiv 2305.13673; the Lano
task of arXiv 2512.17351 uses cfg3f, cfg3j and cfg3k), converted to the format of `text.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected, unknown
from canonlm.tasks.lano import sampling, text
from canonlm.tasks.lano.exact import Distributions
from canonlm.tasks.lano.invent import invent
from canonlm.tasks.lano.parse import Parsing
from canonlm.tasks.random import check_count, check_split

FOLDER = Path(__file__).parent / "grammars"
RELEASED = ("cfg3f", "cfg3j", "cfg3k", "cfg3b", "cfg3g", "cfg3h", "cfg3i", "cfg3e1", "cfg3e2")
BUILT_IN = (*RELEASED, "small")
MAX_LEVELS = 28  # the root, one per letter for the names of symbols, and the terminals
MAX_LEN = 2**16  # tokens in the longest sentence: bounds the tables of the exact distributions and of the sampler

Rules = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


@dataclass(frozen=True)
class Grammar(Distributions, Parsing):
    """A layered grammar. sizes[level]: the number of symbols of a level, root first, terminals last. rules[level][i]:
    the alternatives of symbol i of a level, each a tuple of positions (from 0) in the next level; terminal t has
    position t - 1.

    symbols[level][i]: names for people; default: root, a1 a2 … on level 1, b1 b2 … on level 2, the terminals 1 … T.
    ValueError if the rules do not fit the sizes, or if a sentence could exceed 65536 tokens.
    """

    name: str
    sizes: tuple[int, ...]
    rules: Rules
    symbols: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 2 <= len(self.sizes) <= MAX_LEVELS or self.sizes[0] != 1 or min(self.sizes) < 1:
            raise expected("sizes", f"1 (the root) and the sizes of 1 to {MAX_LEVELS - 1} more levels", self.sizes)
        if tuple(map(len, self.rules)) != tuple(self.sizes[:-1]):
            raise expected("rules", f"alternatives for {self.sizes[:-1]} symbols", tuple(map(len, self.rules)))
        for level, symbols in enumerate(self.rules):
            for i, alternatives in enumerate(symbols):
                children = {child for row in alternatives for child in row}
                complete = alternatives and all(alternatives) and len({*alternatives}) == len(alternatives)
                if not complete or not children <= {*range(self.sizes[level + 1])}:
                    what = f"different rows of positions from 0 to {self.sizes[level + 1] - 1}"
                    raise expected(f"rules[{level}][{i}]", what, alternatives)
        if not self.symbols:
            object.__setattr__(self, "symbols", text.default_symbols(self.sizes))
        if tuple(map(len, self.symbols)) != tuple(self.sizes):
            raise expected("symbols", f"{self.sizes} names", tuple(map(len, self.symbols)))
        if self.max_len > MAX_LEN:
            raise ValueError(f"its longest sentence has {self.max_len} tokens, more than {MAX_LEN}")

    @classmethod
    def load(cls, name: str) -> "Grammar":
        """A built-in grammar by name: one of the nine released ones, or "small", which is ours.

        In cfg3e1, as released, some symbols cannot be reached from the root.
        """
        if name not in BUILT_IN:
            raise unknown("grammar", name, BUILT_IN)
        return cls(name, *text.read(FOLDER / f"{name}.txt", unreachable=True))

    @classmethod
    def read(cls, path: str | Path) -> "Grammar":
        """A grammar from a file of yours (docs/tasks/lano.md has the format), named like the file.

        ValueError, in one line with the file and the line, for anything that is not a layered grammar, for symbols and
        terminals that no sentence can contain, and for a file that cannot be read.
        """
        named = cls.from_text(text.content_of(Path(path)), str(path))
        return replace(named, name=Path(path).stem)

    @classmethod
    def from_text(cls, content: str, name: str = "grammar") -> "Grammar":
        """A grammar from the content of such a file."""
        parts = text.parse(content, name)
        try:
            return cls(name, *parts)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    @classmethod
    def random(cls, seed: int, **knobs: Any) -> "Grammar":
        """A random grammar, a pure function of seed and knobs: see `lano.invent.invent`."""
        sizes, rules = invent(check_count("seed", seed), **knobs)
        return cls(f"random-{seed}", sizes, rules)

    def write(self, path: str | Path) -> None:
        """Write a file for `read`, which accepts all grammars whose root reaches all symbols: all but cfg3e1."""
        text.write(Path(path), self.name, self.symbols, self.rules)

    # -- sentences ----------------------------------------------------------------------------------------------------

    def sample(self, split: str, seed: int, index: int, j: int = 0) -> sampling.Derivation:
        """Instance j of window `index` with its tree: the sentence that `Lano.sample` has for these arguments."""
        at = check_count("seed", seed), check_split(split), check_count("index", index), check_count("j", j)
        return sampling.derivation(self.tables, self.sizes, self.max_len, *at)

    @cached_property
    def tables(self) -> sampling.Tables:
        """The rules as arrays, for the sampler."""
        return sampling.tables(self.sizes, self.rules)

    def __str__(self) -> str:
        return self.name

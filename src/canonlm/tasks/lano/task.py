"""Lano: write a sentence of an unknown grammar. Measures the learning of structure: nested rules.

    bos  x_1 … x_n      e.g.  bos 1 2 1 3 3 … 2 2 1      (249.9 terminals on average for cfg3f)

A window is bos, sentence, bos, sentence, …: the next bos ends a sentence, and is a target like every other token. A
sample has two questions: write a sentence from its start, and continue its first 50 tokens. Any valid sentence is
right. The grammars are the released ones; the evaluation follows arXiv 2512.17351, App. A.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import field_validator

from canonlm.core.errors import InvalidSetting
from canonlm.tasks.base import Malformed, Query, Sample, Sampler, Slice, Task, Verdict, Vocab, register
from canonlm.tasks.describe import Measure, Scale, Score
from canonlm.tasks.lano.grammar import BUILT_IN, Grammar
from canonlm.tasks.lano.sampling import BOS, Packed, loop
from canonlm.tasks.lano.text import content_of
from canonlm.tasks.records import token_id
from canonlm.tasks.rows import Rows, by_label
from canonlm.tasks.spec import TaskSpec

CUT = 50  # tokens given in the second query


@register("lano")
class Lano(Task):
    """Sentences of a layered grammar; train and test have one distribution. Paper: loss on all tokens, even bos."""

    class Spec(TaskSpec):
        grammar: str = "cfg3f"  # a built-in grammar (nine were released, small is ours), a file's path, or rules

        @field_validator("grammar")
        @classmethod
        def _rules(cls, grammar: str) -> str:
            """Replace a file's path by its rules, so that a run's configuration does not change with the file."""
            try:
                return _name_or_rules(grammar)
            except ValueError as error:
                raise InvalidSetting("lano.grammar", f"lano.grammar: {error}") from None

    difficulties = {name: {"grammar": name} for name in BUILT_IN}
    loss_on = "all"
    marker_is_target = True
    evaluation = "canonlm.train.evals.sentences:SentenceEval"
    can_isolate = False

    about = "The model must write sentences that follow a grammar of nested rules, which it only knows from examples."
    scales = {
        "from": Scale(
            "how the sentence starts",
            lambda v: {"start": "from the start", "cut": "after 50 given tokens"}.get(v, v),
            "The model writes a whole sentence by itself, or goes on after the beginning of a true one.",
        )
    }
    measures = {
        "kl": Measure(
            "divergence (KL)",
            "how far the model's guess of the next token is from what the grammar says, averaged over positions "
            "(Kullback–Leibler divergence, nats per token). Zero is perfect; lower is better.",
            log=True,
        )
    }
    score = Score(share="fraction of valid sentences", slice="from=start")

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.grammar = Grammar.from_text(spec.grammar) if "\n" in spec.grammar else Grammar.load(spec.grammar)
        self.vocab = Vocab(["bos", *(str(t) for t in range(1, self.grammar.sizes[-1] + 1))], ["bos"])
        self.max_len = 1 + self.grammar.max_len

    @property
    def min_seq_len(self) -> int:
        """Room for the shortest sentence between two bos, and for bos, the given tokens and one more."""
        return 2 + max(self.grammar.min_len, min(CUT, self.grammar.max_len))

    def slices(self) -> list[Slice]:
        start: Slice = {"from": "start"}
        return [start, {"from": "cut"}] if self.grammar.max_len > CUT else [start]

    def chance(self, slice: Slice) -> float:
        """An upper bound for uniformly random terminals of the right number (see `Grammar.random_strings`).

        A model that has memorized one sentence scores 1 from the start without knowing the grammar: look at the KL to
        the true next-token distribution, too.
        """
        return self._chance[str(slice["from"])]

    @cached_property
    def _chance(self) -> dict[str, float]:
        lengths = self.grammar.length_distribution
        sentences, ends = (np.minimum(bounds, 1) for bounds in self.grammar.random_strings)
        longer = self.grammar.longer_than(CUT)
        return {
            "start": float(lengths @ sentences),
            "cut": float(lengths[CUT + 1 :] @ ends[1 : len(lengths) - CUT]) / longer if longer else 0.0,
        }

    def to_original(self, sample: Sample) -> list[int]:
        """The terminals, without bos: the release counts them from 1, too."""
        return sample.tokens[1:].tolist()

    def from_original(self, ids: Any) -> Sample:
        return self.read([BOS, *np.asarray(ids).tolist()])

    def explain(self, sample: Sample, query: Query) -> str:
        """The top two levels of one tree: the children of the root, and their children."""
        tree, names = self.grammar.parse(sample.tokens[1:]), self.grammar.symbols
        assert tree is not None
        levels = [tree.nodes(level) for level in range(len(names) - 1)]
        levels.append([(token - 1, i, i + 1) for i, token in enumerate(tree.tokens.tolist())])
        steps = []
        for level in range(min(2, len(names) - 1)):
            for symbol, start, stop in levels[level]:
                children = [names[level + 1][child] for child, at, _ in levels[level + 1] if start <= at < stop]
                span = f" (tokens {start + 1}-{stop})" if level else ""
                steps.append(f"{names[level][symbol]}{span} → {' '.join(children)}")
        return "; ".join(steps)

    def grade(self, sample: Sample, output: Any) -> list[Verdict]:
        """As for every task; a sentence is the output up to the next bos, or all of it if it has no bos.

        A flat sequence as long as sample.tokens is read position by position only if it begins with bos: a sentence
        with the bos that ends it can be just as long.
        """
        flat = output.tolist() if hasattr(output, "tolist") else output
        as_long = isinstance(flat, list | tuple) and len(flat) == len(sample.tokens)
        if as_long and not isinstance(flat[0], list | tuple) and np.ndim(flat[0]) == 0 and token_id(flat[0]) != BOS:
            output = [flat]
        return super().grade(sample, output)

    def _judge(self, sample: Sample, query: Query, answer: list[Any] | None) -> Verdict:
        ids = [token_id(token) for token in answer or []]
        tokens = (answer or [])[: ids.index(BOS) if BOS in ids else None]
        flaw = self._flaw([*sample.tokens[1 : query.start].tolist(), *tokens])
        if flaw is None:
            return Verdict(True, query.slice, "")
        got = f"got {len(tokens)} tokens" if tokens else "got nothing"
        return Verdict(False, query.slice, f"{got}; not in the language: at token {flaw[0]} {flaw[1]}")

    def _flaw(self, sentence: Sequence[object]) -> tuple[int, str] | None:
        """(number of the token, counted from 1, and what is wrong there), or None for a sentence of the language."""
        terminals = len(self.vocab) - 1
        # max_len counts the bos, so this keeps one token more than the longest sentence has: enough to reject it.
        ids = [token_id(token) for token in sentence[: self.max_len]]
        for number, (token, at) in enumerate(zip(sentence, ids, strict=False), 1):
            if not 1 <= at <= terminals:
                return number, f"expected 1 … {terminals}, got {self.vocab.name(token)}"
        if self.grammar.contains(ids):
            return None
        dead = self.grammar.first_dead(ids)
        if dead is None:
            return len(ids) + 1, "the sentence is not complete"
        return dead + 1, f"no sentence that starts like this goes on with {ids[dead]}"

    def sampler(self, test: bool) -> Sampler:
        return loop, Packed(self.grammar.tables, len(self.grammar.rules), self.grammar.max_len)

    def sample_rows(self, split: str, seed: int, start: int, count: int, *, loss_on: str | None = None) -> Rows:
        """As for every task, from the windows; the second question of the sentences that have one is not labelled."""
        rows = by_label(self, split, seed, start, count, loss_on)
        num_queries = 1 + (rows.lengths > CUT + 1)
        starts = np.full(num_queries.sum(), CUT + 1, np.int32)
        starts[np.cumsum(num_queries) - num_queries] = 1
        stops = np.repeat(rows.lengths, num_queries).astype(np.int32)
        return rows._replace(spans=num_queries, starts=starts, stops=stops)

    def _read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        if (flaw := self._flaw(tokens[self.vocab.after(tokens, 0, BOS) :])) is not None:
            raise Malformed(*flaw)
        n = len(tokens) - 1
        queries = [Query(1, n + 1, {"from": "start"}, 0)]
        if n > CUT:  # its question is not marked: those tokens are part of the answer to the first query
            queries.append(Query(CUT + 1, n + 1, {"from": "cut"}, CUT + 1))
        return {"n": n}, tuple(queries)


def _name_or_rules(grammar: str) -> str:
    """The name of a built-in grammar, or rules: `grammar` itself if it has several lines, else the file's content."""
    path = Path(grammar)
    if "\n" in grammar:
        Grammar.from_text(grammar)
    elif grammar in BUILT_IN or not (path.suffix or len(path.parts) > 1 or path.is_file()):
        Grammar.load(grammar)
    elif not path.is_file():
        raise ValueError(f"there is no grammar file {path}")
    else:
        Grammar.read(path)
        return content_of(path).strip() + "\n"
    return grammar

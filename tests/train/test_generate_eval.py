"""Generated answers, graded: models whose answers are known, and the batches they come in."""

from graphlib import TopologicalSorter

import numpy as np
import pytest
import torch
from torch import nn

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.models.hf import outside_model
from canonlm.models.interface import Sizes
from canonlm.train import evals
from canonlm.train.evals.generate import GenerateEval, generate

CPU = torch.device("cpu")
TASK = tasks.get("brevo", N=9)
WORDS = tasks.get("brevo", N=9, name_vocab=3, min_name_len=1, max_name_len=2)


def evaluate(model, task=TASK, size=40, batch_size=16):
    stream = WindowStream(task, "test", 0, task.max_len, "answer", False)
    return GenerateEval(stream, size, batch_size).run(wrap(model), CPU)


def another_order(task, prompt):
    """The answer in graphlib's order, from the prompt alone: ancestors of the node, parents first."""
    names = task.vocab.text(prompt).split(" ")
    edges, questions = names[1 : names.index("query")], names[names.index("query") + 1 : -1]
    if task is WORDS:  # a dot ends a name

        def join(parts):
            return [name.strip() + "." for name in " ".join(parts).split(".") if name.strip()]

        edges, questions = join(edges), join(questions)
    parents = {}
    for parent, child in zip(edges[::2], edges[1::2], strict=True):
        parents.setdefault(child, set()).add(parent)
    expected, todo = set(), [questions[0]]
    while todo:
        if (node := todo.pop()) not in expected:
            expected.add(node)
            todo += parents.get(node, ())
    order = TopologicalSorter({node: sorted(parents.get(node, ())) for node in sorted(expected)}).static_order()
    return [task.vocab.ids[token] for name in order for token in name.split(" ")] + [task.vocab.ids["end"]]


def says(task, answer_to):
    """The distribution of a model that writes `answer_to(prompt)` after each `ans`."""
    ans = task.vocab.ids["ans"]

    def distribution(tokens):
        scores = np.zeros((len(tokens), len(task.vocab)))
        if ans in tokens:
            start = tokens.index(ans) + 1
            answer = answer_to(tokens[:start])
            for i in range(start - 1, len(tokens)):
                scores[i, answer[min(i - start + 1, len(answer) - 1)]] = 50.0
        return scores

    return distribution


@pytest.mark.parametrize("task", [TASK, WORDS], ids=["one token", "names of tokens"])
def test_any_valid_order_is_right(knows, task):
    model = knows(len(task.vocab), says(task, lambda prompt: another_order(task, prompt)))
    row = evaluate(model, task)
    totals = {key: sum(e["total"] for e in row["slices"] if key in e["slice"]) for key in ("n", "depth", "nodes")}
    assert totals == {"n": 40, "depth": 40, "nodes": 40}  # every key of a slice is counted separately
    assert all(entry["correct"] == entry["total"] for entry in row["slices"])
    assert row["slices"][0]["slice"] == {"n": 9}
    orders = [another_order(task, s.tokens[: s.queries[0].start].tolist()) == s.tokens[s.queries[0].start :].tolist()
              for s in (task.sample("test", 0, i) for i in range(40))]  # fmt: skip
    assert not all(orders), "the comparison needs answers that differ from the sample's own"


def test_output_that_is_not_an_answer_scores_zero(knows):
    end = TASK.vocab.ids["end"]
    broken = {
        "no end": lambda prompt: another_order(TASK, prompt)[:-1],
        "nothing": lambda prompt: [end],
        "children first": lambda prompt: [*another_order(TASK, prompt)[-2::-1], end],
        "one too few": lambda prompt: another_order(TASK, prompt)[1:],
        "again": lambda prompt: [another_order(TASK, prompt)[0], *another_order(TASK, prompt)],
    }
    for name, answer_to in broken.items():
        row = evaluate(knows(len(TASK.vocab), says(TASK, answer_to)), size=12)
        assert row["slices"][0] == {"slice": {"n": 9}, "correct": 0, "total": 12}, name


def test_batches_and_padding_change_nothing():
    torch.manual_seed(0)
    for mixer in ("attention", "gdn"):
        config = CanonLMConfig(
            vocab_size=len(TASK.vocab), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mixers=[mixer],
            canon_set="ACD", initializer_range=0.3,
        )  # fmt: skip
        model = wrap(CanonLMForCausalLM(config).eval())
        prompts = [s.tokens[: s.queries[0].start].tolist() for s in (TASK.sample("train", 0, i) for i in range(12))]
        assert len({len(prompt) for prompt in prompts}) > 3
        with torch.no_grad():
            alone = [generate(model, [prompt], 10, 3, CPU)[0] for prompt in prompts]
            assert generate(model, prompts, 10, 3, CPU) == alone
        assert len({tuple(answer) for answer in alone}) > 3


class Sums(nn.Module):
    """A module of a user that has no mask: it reads its padding."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size)

    def forward(self, ids):
        return self.head(self.embed(ids).cumsum(1).sin())


def test_batches_change_nothing_for_a_module_without_a_mask():
    model = outside_model("own.py:Sums", Sums, Sizes(1, 32, 1, len(TASK.vocab), TASK.max_len))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[TASK.vocab.ids["w7"]] = torch.nan
    stream = WindowStream(TASK, "train", 0, TASK.max_len, "answer", False)
    results = []
    for batch_size in (1, 16):
        evaluation, answers = GenerateEval(stream, 24, batch_size), []
        evaluation.keep = answers.append
        evaluation.run(model, CPU)
        # A batch writes as many tokens as the longest of its true answers has.
        results.append([(a.model_answer.split()[: len(a.answer.split())], a.finite) for a in answers])
    assert results[1] == results[0]
    assert len({tuple(tokens) for tokens, _ in results[0]}) > 3
    assert 0 < sum(finite for _, finite in results[0]) < len(results[0]) == 24


def test_the_task_chooses_its_evaluation():
    stream = WindowStream(TASK, "test", 0, 64, "answer", False)
    assert isinstance(evals.build(stream, 4, 8), GenerateEval)
    assert {tasks.get(name).evaluation for name in tasks.names()} > set(evals.KINDS)
    for task, kind in ((tasks.get("lano"), "SentenceEval"), (tasks.get("capo", N=20, exposures=1), "FactEval")):
        stream = WindowStream(task, "test", 0, 700, "all", False)
        assert type(evals.build(stream, 4, 8)).__name__ == kind

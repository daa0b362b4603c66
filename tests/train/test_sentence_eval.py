"""Sentences that models generate, and the divergence of their next-token distributions from the true ones."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.tasks.lano import Grammar
from canonlm.train.evals.sentences import SentenceEval

CPU = torch.device("cpu")
SMALL = "s = a b | b a b\na = 1 2 | 2 1 1\nb = 1 1 | 2 2 1 | 1 2\n"


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammars")
    (folder / "small.txt").write_text(SMALL)
    grammar = Grammar.random(7, sizes=(1, 3, 3, 3, 3), alternatives=(2, 2), repeat_symbols=False)
    grammar.write(folder / "long.txt")
    return {name: tasks.get("lano", grammar=str(folder / f"{name}.txt")) for name in ("small", "long")}


def truth(task):
    """The grammar itself as a model: rows of ln P(end, 1 … T), where the end is bos."""

    def probabilities(tokens):
        starts = [i for i, token in enumerate(tokens) if token == 0]  # a window holds several sentences
        with np.errstate(divide="ignore"):
            rows = [
                np.log(np.nan_to_num(task.grammar.next_token_probs(tokens[start + 1 : stop])))
                for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)
            ]
        return np.maximum(np.concatenate(rows), -1e9)

    return probabilities


def evaluation(task, size, batch_size=64, seq_len=128):
    return SentenceEval(WindowStream(task, "test", 0, seq_len, "all", False), size, batch_size)


def test_the_grammar_itself_is_always_right(knows, grammars):
    task = grammars["long"]
    row = evaluation(task, 30).run(wrap(knows(len(task.vocab), truth(task))), CPU)
    start, cut = row["slices"]
    assert start == {"slice": {"from": "start"}, "correct": 30, "total": 30}
    assert cut["slice"] == {"from": "cut"}
    assert cut["correct"] == cut["total"] == sum(len(task.sample("test", 0, i).tokens) > 51 for i in range(30)) > 3
    assert row["measures"]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_sampling_is_exact(knows, grammars):
    """At temperature 1, sentences of the grammar occur with their true frequencies."""
    task = grammars["small"]
    model = knows(len(task.vocab), truth(task))
    evaluation_ = evaluation(task, 600, batch_size=600)
    with torch.no_grad():
        answer = evaluation_._write(wrap(model), list(range(600)), 1, CPU)
    counts = Counter(tuple(sentence) for sentence in answer)
    probabilities = {s: np.exp(task.grammar.log_probability(s[:-1])) for s in counts}
    assert all(probability > 0 and s[-1] == 0 for s, probability in probabilities.items())
    common = [s for s, probability in probabilities.items() if 600 * probability > 8]
    observed = [counts[s] for s in common]
    expected = [600 * probabilities[s] for s in common]
    result = stats.chisquare([*observed, 600 - sum(observed)], [*expected, 600 - sum(expected)])
    assert len(common) > 10
    assert result.pvalue > 1e-3


@pytest.mark.slow
def test_guessing_scores_the_exact_chance(knows, grammars):
    """A uniform model, over the end too: each sentence of n tokens has probability 3^-(n + 1)."""
    task = grammars["small"]
    a, b = ("12", "211"), ("11", "221", "12")
    sentences = {x + y for x in a for y in b} | {y + x + z for y in b for x in a for z in b}
    assert all(task.grammar.contains([*map(int, sentence)]) for sentence in sentences)
    chance = sum(3.0 ** -(len(sentence) + 1) for sentence in sentences)
    row = evaluation(task, 4000, 2000).run(wrap(knows(3, lambda tokens: np.zeros((len(tokens), 3)))), CPU)
    assert 0.01 < chance < 0.1
    share = row["slices"][0]["correct"] / row["slices"][0]["total"]
    assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / 4000)


def test_batches_change_nothing(grammars):
    task = grammars["long"]
    torch.manual_seed(0)
    config = CanonLMConfig(vocab_size=len(task.vocab), hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = CanonLMForCausalLM(config).eval()
    with torch.no_grad():
        full = evaluation(task, 12)._write(wrap(model), list(range(12)), 1, CPU)
        parts = evaluation(task, 12)._write(wrap(model), [7, 3], 1, CPU)
    assert parts == [full[7], full[3]]
    assert len({tuple(sentence) for sentence in full}) > 6
    rows = [evaluation(task, 12, size).run(wrap(model), CPU) for size in (12, 5)]
    assert rows[0]["slices"] == rows[1]["slices"]
    assert rows[0]["measures"]["kl"] == pytest.approx(rows[1]["measures"]["kl"], rel=1e-6)


def test_divergence_by_hand(knows, grammars):
    """The divergence of a uniform model is sum p ln p + ln(T + 1), smoothed as in the release."""
    task = grammars["small"]
    columns = len(task.vocab)
    row = evaluation(task, 20).run(wrap(knows(columns, lambda tokens: np.zeros((len(tokens), columns)))), CPU)
    total, count = 0.0, 0
    for i in range(20):
        for p in task.grammar.next_token_probs(task.sample("test", 0, i).tokens[1:]):
            smooth = (p + 1e-5) / (1 + 1e-5 * columns)
            total += float((p * (np.log(smooth) - np.log(1 / columns))).sum())
            count += 1
    assert row["measures"]["kl"] == pytest.approx(total / count, rel=1e-6)


def test_long_sentences_count_up_to_the_window(knows, grammars):
    task = grammars["small"]
    assert task.grammar.min_len == 4
    row = evaluation(task, 10, seq_len=4).run(wrap(knows(len(task.vocab), truth(task))), CPU)
    assert row["slices"][0] == {"slice": {"from": "start"}, "correct": 0, "total": 10}, "none fits"
    assert row["measures"]["kl"] == pytest.approx(0, abs=1e-6)


def test_memory_does_not_grow_with_the_number_of_sentences(knows):
    """The probabilities of 1,000 terminals after each of 60 x 9 tokens are 4 MB, of the grammar and of the model."""
    rows = " | ".join(f"{i} {i + 1}" for i in range(1, 1000, 2))
    task = tasks.get("lano", grammar=f"s = a a a a\na = {rows}\n")
    model, peaks = wrap(knows(1001, lambda tokens: np.zeros((len(tokens), 1001)))), []
    for size in (4, 4, 60):  # the first one compiles
        compared = evaluation(task, size, batch_size=4)
        tracemalloc.start()
        compared._divergence(model, CPU)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del compared
    assert peaks[2] < peaks[1] + 1e6

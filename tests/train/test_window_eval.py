"""The grading of test windows, against models whose answers are known."""

import pytest
import torch
from torch import nn

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.data.windows import WindowStream
from canonlm.models.build import wrap
from canonlm.train.evals.windows import WindowEval, read_off

TASKS = {
    "copying": (tasks.get("copying", N=8), 50, "answer"),
    "depo": (tasks.get("depo", N=6, K=3, M=4, name_vocab=5, min_name_len=1, max_name_len=2), 120, "answer"),
    "mano": (tasks.get("mano", L=3), 70, "all"),
    "state": (tasks.get("state", group="S3", N=9), 60, "answer"),
    "mqar": (tasks.get("mqar", pairs=5, keys=7, values=6), 60, "answer"),
}

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Says:
    """A language model that puts all its weight on `says(input_ids)`, the next token of every position."""

    def __init__(self, vocab_size, says):
        self.vocab_size, self.says = vocab_size, says

    def logits(self, input_ids, documents=None):
        return 100.0 * nn.functional.one_hot(self.says(input_ids), self.vocab_size)


def truth(input_ids):
    return torch.roll(input_ids, -1, dims=1)


def evaluate(name, says, windows=64, batch_size=24, isolate=False):
    task, seq_len, loss_on = TASKS[name]
    stream = WindowStream(task, "test", 0, seq_len, loss_on, isolate)
    model = Says(len(task.vocab), says)
    return WindowEval(stream, windows, batch_size).run(model, torch.device("cpu"))


def instances_by_hand(name, windows):
    """All complete instances of the test windows, without the task's packing code."""
    task, seq_len, _ = TASKS[name]
    for window in range(windows):
        at = j = 0
        while at + len((sample := task.sample("test", 0, window, j)).tokens) <= seq_len:
            yield window, at, sample
            at, j = at + len(sample.tokens), j + 1


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("isolate", [False, True])
def test_the_oracle_answers_every_query_of_every_complete_instance(name, isolate):
    queries = [str(query.slice) for _, _, sample in instances_by_hand(name, 64) for query in sample.queries]
    row = evaluate(name, truth, isolate=isolate)
    assert row["token_accuracy"] == 1.0
    assert row["loss"] == pytest.approx(0, abs=1e-6)
    slices = [(where, queries.count(str(where))) for where in TASKS[name][0].slices()]
    assert row["slices"] == [{"slice": where, "correct": total, "total": total} for where, total in slices]
    assert all(total for _, total in slices)


def test_token_accuracy_and_verdicts_by_hand():
    """A model that is right, except that it gives x4 instead of x3."""
    task = TASKS["copying"][0]
    x3, x4 = task.vocab.ids["x3"], task.vocab.ids["x4"]

    def says(input_ids):
        written = truth(input_ids)
        return torch.where(written == x3, x4, written)

    right = total = 0
    slices = {}
    for _, _, sample in instances_by_hand("copying", 32):
        answer = sample.tokens[10:].tolist()  # bos, 8 items, ans
        assert len(answer) == 8
        right, total = right + sum(token != x3 for token in answer), total + 8
        for first in (1, 2, 4, "all"):
            count = slices.setdefault(first, [0, 0])
            count[0] += x3 not in answer[: 8 if first == "all" else first]
            count[1] += 1
    row = evaluate("copying", says, windows=32, batch_size=5)
    assert row["token_accuracy"] == pytest.approx(right / total)
    assert {entry["slice"]["first"]: [entry["correct"], entry["total"]] for entry in row["slices"]} == slices
    assert 0 < slices[1][0] < slices[1][1]


def test_the_loss_is_the_mean_over_labels_and_batches_do_not_matter():
    task, seq_len, _ = TASKS["depo"]
    model = CanonLMForCausalLM(CanonLMConfig(**SIZES, vocab_size=len(task.vocab), canon_set="AC")).eval()
    for isolate in (False, True):
        stream = WindowStream(task, "test", 0, seq_len, "answer", isolate)
        rows = [WindowEval(stream, 10, size).run(wrap(model), torch.device("cpu")) for size in (10, 3)]
        batch = stream.rows(0, 10)
        full = model(batch.input_ids, shift_labels=batch.targets, doc_ids=batch.documents)
        assert rows[0]["loss"] == pytest.approx(full.loss.item(), rel=1e-5)
        assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert rows[0]["slices"] == rows[1]["slices"]


def test_verdicts_equal_those_of_greedy_generation():
    """One instance per window, and a model that is often right: the grading of windows agrees with the grading of what
    it generates after `ans`, for every query."""
    task = tasks.get("depo", N=3, K=2, M=3, name_vocab=2, min_name_len=1, max_name_len=2)
    torch.manual_seed(0)
    model = CanonLMForCausalLM(CanonLMConfig(**SIZES, vocab_size=len(task.vocab), canon_set="ABCD"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = WindowStream(task, "train", 0, task.max_len, "answer", True)
    for step in range(60):
        batch = train.rows(step * 16, 16)
        model(batch.input_ids, shift_labels=batch.targets, doc_ids=batch.documents).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = total = 0
    for w in range(16):
        sample = task.sample("test", 0, w)
        single = WindowStream(task, "test", 0, len(sample.tokens), "answer", True)
        with torch.no_grad():
            answer, _, _, _ = read_off(wrap(model), single, w, 1, torch.device("cpu"))
        judged = [verdict.correct for verdict in task.grade(sample, answer[0])]
        generated = []
        for query in sample.queries:
            prompt = torch.tensor(sample.tokens[: query.start])[None].long()
            length = query.stop - query.start
            with torch.no_grad():
                output = model.generate(prompt, do_sample=False, max_new_tokens=length, eos_token_id=None)
            generated.append(output[0, query.start :].tolist() == sample.tokens[query.start : query.stop].tolist())
        assert judged == generated
        right, total = right + sum(judged), total + len(judged)
    assert 0.1 < right / total < 0.95, "the comparison needs right and wrong answers"


def test_answers_that_are_not_the_next_tokens():
    """Products of words of Z5, which an oracle adds up, and another only while they are short."""
    task = tasks.get("state", group="Z5", answers="every", N=4, test_lengths=[2, 4, 6])
    stream = WindowStream(task, "test", 0, 24, "answer", False)

    def adds(input_ids, reach=99):
        rows = []
        for row in input_ids.tolist():
            total, place, says = 0, 0, []
            for token in row:
                total, place = (0, 0) if token < 2 else (total + token - 2, place + 1)
                says.append(2 + total % 5 if place <= reach else 0)
            rows.append(says)
        return torch.tensor(rows)

    right = WindowEval(stream, 8, 3).run(Says(len(task.vocab), adds), torch.device("cpu"))
    assert (right["loss"], right["token_accuracy"]) == (pytest.approx(0, abs=1e-6), 1.0)
    assert right["slices"] == [{"slice": {"n": n}, "correct": 24, "total": 24} for n in (2, 4, 6)]
    short = WindowEval(stream, 8, 3).run(Says(len(task.vocab), lambda ids: adds(ids, 4)), torch.device("cpu"))
    assert [entry["correct"] for entry in short["slices"]] == [24, 24, 0]

"""Validation on text, against every document read alone in float64, and distributed over processes."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from prepared_folders import write_prepared

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.core.distributed import World
from canonlm.data.shards import Dataset
from canonlm.models.build import wrap
from canonlm.train.evals.text import TextEval

CPU = torch.device("cpu")
SEQ_LEN, VOCAB_SIZE, BYTES_PER_TOKEN = 8, 40, 3


class Share(World):
    """One of several data-parallel processes, which run one after the other here; sums are not reduced."""

    @property
    def dp_size(self):
        return self.size

    def sum(self, numbers):
        return numbers


class Counting:
    """Forwards calls, and records their shapes."""

    def __init__(self, model):
        self.model, self.shapes = wrap(model), []

    def loss(self, input_ids, targets, documents, num_targets):
        self.shapes.append(tuple(input_ids.shape))
        return self.model.loss(input_ids, targets, documents, num_targets)


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(3)
    return [generator.integers(VOCAB_SIZE, size=size).tolist() for size in (5, 1, 13, 2, 30, 7, 3, 3, 12, 9)]


@pytest.fixture(scope="module")
def dataset(documents, tmp_path_factory):
    splits = {"train": [], "valid": [documents]}
    return Dataset(write_prepared(tmp_path_factory.mktemp("text"), splits, bytes_per_token=BYTES_PER_TOKEN))


def model(**settings):
    config = CanonLMConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, canon_set="ABCD", **settings
    )
    made = CanonLMForCausalLM(config).double().eval()
    with torch.no_grad():  # far from uniform, so that tokens have different losses
        made.lm_head.weight.mul_(30)
    return made


def nats(made, text):
    """The cross-entropy of all but the first token of one text alone, and the number of these tokens."""
    if len(text) < 2:
        return 0.0, 0
    with torch.no_grad():
        logits = made(torch.tensor([text[:-1]]), use_cache=False).logits[0].numpy()
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return float(sum(z - row[token] for z, row, token in zip(log_z, logits, text[1:], strict=True))), len(text) - 1


def brute(made, documents, windows, isolate):
    row = [(token, number) for number, document in enumerate(documents) for token in document]
    total = count = 0
    for start in range(0, windows * SEQ_LEN, SEQ_LEN):
        part = row[start : start + SEQ_LEN + 1]
        numbers = sorted({number for _, number in part}) if isolate else [None]
        for number in numbers:
            sums = nats(made, [token for token, own in part if number in (None, own)])
            total, count = total + sums[0], count + sums[1]
    return total, count


def evaluation(dataset, size=100, rows=3, world=None, isolate=False):
    sets = {"books": (dataset, "valid"), "again": (dataset, "valid")}
    return TextEval(sets, size, rows, world or World(CPU), seq_len=SEQ_LEN, isolate_documents=isolate)


@pytest.mark.parametrize(
    ("isolate", "z_loss", "size"),
    [(False, None, 1), (True, "logsumexp", 4), (False, "squared_nll", 100), (True, None, 100)],
)
def test_equals_documents_read_alone(documents, dataset, isolate, z_loss, size):
    made = model(z_loss=z_loss, z_loss_weight=0.1)
    windows = min(size, (sum(map(len, documents)) - 1) // SEQ_LEN)
    total, count = brute(made, documents, windows, isolate)
    result = evaluation(dataset, size, isolate=isolate).run(wrap(made), CPU)
    assert result["loss"] == pytest.approx(total / count, rel=1e-9)
    assert list(result["sets"]) == ["books", "again"]
    for row in result["sets"].values():
        assert row["tokens"] == count
        assert row["loss"] == pytest.approx(total / count, rel=1e-9)
        size_in_bytes = windows * SEQ_LEN * BYTES_PER_TOKEN
        assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / size_in_bytes, rel=1e-9)


@pytest.mark.parametrize("skip", [0, 2])
def test_tokens_beyond_the_trained_length_and_windows_that_are_skipped(documents, dataset, skip):
    """In causal models, the loss beyond is that of the longer window minus that of its beginning."""
    made, row, beyond = model(), [*chain(*documents)], 5
    sets = {"books": (dataset, "valid")}
    result = TextEval(
        sets, 3, 2, World(CPU), seq_len=SEQ_LEN, isolate_documents=False, skip=skip, beyond=beyond
    ).run(wrap(made), CPU)  # fmt: skip
    short = [
        nats(made, row[start : start + SEQ_LEN + 1]) for start in range(skip * SEQ_LEN, (skip + 3) * SEQ_LEN, SEQ_LEN)
    ]
    assert result["loss"] == pytest.approx(sum(total for total, _ in short) / (3 * SEQ_LEN), rel=1e-9)
    longer = SEQ_LEN + beyond
    parts = [row[start : start + longer + 1] for start in range(skip * longer, (skip + 3) * longer, longer)]
    cost = sum(nats(made, part)[0] - nats(made, part[: SEQ_LEN + 1])[0] for part in parts)
    assert result["measures"] == {"loss_beyond": pytest.approx(cost / (3 * beyond), rel=1e-9)}


@pytest.mark.every(3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("isolate", [False, True])
def test_processes_share_the_windows_and_call_equally_often(dataset, ranks, isolate):
    full = evaluation(dataset, isolate=isolate).run(wrap(made := model()), CPU)["sets"]["books"]
    shares = []
    for rank in range(ranks):
        counted = Counting(made)
        world = Share(CPU, rank=rank, size=ranks)
        result = evaluation(dataset, isolate=isolate, world=world).run(counted, CPU)["sets"]["books"]
        shares.append((result["loss"] * result["tokens"], result["tokens"], counted.shapes))
    assert sum(tokens for _, tokens, _ in shares) == full["tokens"]
    assert sum(loss for loss, _, _ in shares) == pytest.approx(full["loss"] * full["tokens"], rel=1e-9)
    shapes = [shapes for _, _, shapes in shares]
    assert len(set(shapes[0])) == 1
    assert all(other == shapes[0] for other in shapes)


@pytest.mark.parametrize(
    ("split", "skip", "message"),
    [
        ("train", 0, "0 tokens in its split train, and one window has 9"),
        ("valid", 10, "train.eval_size: expected less than 10, the number of held-out windows, got 10"),
    ],
)
def test_too_little_text(dataset, split, skip, message):
    with pytest.raises(ValueError, match=message):
        TextEval({"x": (dataset, split)}, 9, 1, World(CPU), seq_len=SEQ_LEN, isolate_documents=False, skip=skip)


def test_too_little_text_beyond_the_trained_length(dataset):
    def evaluation_of(beyond):
        TextEval({"x": (dataset, "valid")}, 9, 1, World(CPU), seq_len=SEQ_LEN, isolate_documents=False, beyond=beyond)

    rest = dataset.num_tokens("valid") - 1 - SEQ_LEN
    evaluation_of(rest)
    with pytest.raises(ValueError, match=rf"^train.eval_beyond: expected at most {rest}, as .*, got {rest + 1}$"):
        evaluation_of(rest + 1)

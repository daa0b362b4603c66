"""`canonlm eval A B --suite text`: sums of nats by an independent loop, paired differences, mistakes."""

import json
import math
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import make_decoder, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from canonlm.cli import main
from canonlm.data.tokenizers import load
from canonlm.runs.answers import read_answers
from canonlm.suites import text as text_suite
from canonlm.suites.load_model import Subject, as_in_training
from canonlm.suites.text import TextSettings, documents, rows, scores

TEXTS = ["abc", "one two three four five six", "grüße " * 9, "x" * 40, "the quick brown fox. " * 3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of bytes with 32 positions, one that is twice as wide, and the texts."""
    home = tmp_path_factory.mktemp("models")
    for name, width in (("a", 16), ("b", 32)):
        torch.manual_seed(width)
        config = LlamaConfig(vocab_size=258, hidden_size=width, intermediate_size=32, num_hidden_layers=1,
                             num_attention_heads=2, max_position_embeddings=32, initializer_range=0.3)  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(home / name)
        as_in_training(*load("bytes")).save_pretrained(home / name)
    (home / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return home


def results(folder):
    [entry] = json.loads((folder / "results.json").read_text())["results"]
    return entry, read_answers(folder, entry)


def expected_losses(folder, text, context):
    """(tokens before, nats) of every token, from a forward of its own over at most `context` tokens."""
    model, words = AutoModelForCausalLM.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)
    ids = [words.bos_token_id, *words(text, add_special_tokens=False)["input_ids"]]
    for place in range(1, len(ids)):
        half = context // 2
        begin = 0 if place < context else (place - half) // half * half
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:place]])).logits[0, -1]
        yield place - begin, -logits.log_softmax(-1)[ids[place]].item()


def test_two_models_and_their_differences(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["eval", str(folders / "a"), str(folders / "b"), "--suite", "text", str(folders / "my.jsonl")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    bits = {}
    for name in ("a", "b"):
        entry, rows = results(tmp_path / "evals" / name)
        totals = []
        for text, row in zip(TEXTS, rows, strict=True):
            losses = list(expected_losses(folders / name, text, 32))
            assert row["bytes"] == row["tokens"] == len(text.encode()) == len(losses)
            assert row["nats"] == pytest.approx(sum(nats for _, nats in losses), rel=1e-5)
            for place, (nats, tokens) in row["positions"].items():
                low = int(place)
                own = [loss for before, loss in losses if low <= before < (2 * low or 16)]
                assert (nats, tokens) == (pytest.approx(sum(own), rel=1e-5), len(own))
            totals += losses
        bits[name] = [row["nats"] / math.log(2) / row["bytes"] for row in rows]
        scores = {score["measure"]: score for score in entry["scores"] if not score["slice"]}
        assert scores["bits_per_byte"]["value"] == pytest.approx(np.mean(bits[name]))
        assert scores["bits_per_byte"]["stderr"] == pytest.approx(stats.sem(bits[name]))
        assert scores["perplexity"]["value"] == pytest.approx(math.exp(np.mean([nats for _, nats in totals])), rel=1e-5)

    differences = np.subtract(bits["b"], bits["a"])
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert f"{differences.mean():+.4f}" in printed
    assert f"{low:+.4f} to {high:+.4f}" in printed
    assert "nats per token, after 16 tokens or more" in printed
    assert main(command) == 0
    assert capsys.readouterr().out.count("(as before)") == 2
    assert main([*command, "context=[16,32]", "--out", "both"]) == 0
    assert capsys.readouterr().out.count("Differences from") == 2
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["1-a", "2-b"]


def test_an_interrupted_evaluation_continues_after_the_last_document(folders, tmp_path, monkeypatch):
    command = ["eval", str(folders / "a"), "--suite", "text", str(folders / "my.jsonl"), "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    read, losses = [], text_suite._losses

    def counted(subject, ids, *more):
        read.append(len(ids))
        if len(read) == 4:
            raise KeyboardInterrupt
        return losses(subject, ids, *more)

    monkeypatch.setattr(text_suite, "_losses", counted)
    with suppress(KeyboardInterrupt):
        assert main([*command, str(tmp_path / "out")]) == 130
    (path,) = (tmp_path / "out" / "answers").glob("*.jsonl")
    assert path.read_text().count("\n") == 3
    with path.open("a") as file:
        file.write('{"index": 3, "sli')  # as a killed process leaves it
    assert main([*command, str(tmp_path / "out")]) == 0
    assert len(read) == 4 + 2
    (resumed, rows), (entry, expected) = results(tmp_path / "out"), results(tmp_path / "whole")
    assert rows == expected
    assert (resumed["scores"], resumed["answers"]["sha256"]) == (entry["scores"], entry["answers"]["sha256"])


@pytest.mark.parametrize("damage", ['"positions": []', '"positions": {"0": []}', '"nats": 1'])
def test_a_damaged_row_of_an_interrupted_evaluation_is_named(folders, tmp_path, capsys, damage):
    command = ["eval", str(folders / "a"), "--suite", "text", str(folders / "my.jsonl"), "--out", str(tmp_path)]
    assert main(command) == 0
    (path,) = (tmp_path / "answers").glob("*.jsonl")
    (tmp_path / "results.json").unlink()
    lines = path.read_text().splitlines()
    row = {"index": 0, "slice": {}, "right": {}, "bytes": 3, "tokens": 3} | json.loads(f"{{{damage}}}")
    path.write_text("\n".join([json.dumps(row), *lines[1:], ""]))
    capsys.readouterr()
    assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a damaged line" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "MODEL: expected models and one file of documents"),
        (["my.jsonl"], "MODEL: expected models and one file of documents"),
        (["a", "none.jsonl"], 'MODEL: expected a file of documents that exists, got "none.jsonl"'),
        (["a", "my.jsonl", "text_key=body"], "text_key: expected one of the keys in my.jsonl, line 1 (text)"),
        (["a", "bad.jsonl"], "bad.jsonl, line 2: expected an object with a text that is not empty"),
        (["a", "half.jsonl"], "half.jsonl, line 2: expected text without half of a surrogate pair, which is not a Uni"),
        (["a", "my.jsonl", "context=33"], "context: expected at most 32, the model's, got 33"),
        (["a", "my.jsonl", "contxt=8"], 'unknown setting "contxt". Did you mean "context"?'),
    ],
)
def test_mistakes(folders, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "my.jsonl"):
        (tmp_path / name).symlink_to(folders / name)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 7}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "good"}\n{"text": "\\ud800"}\n')
    assert main(["eval", *words, "--suite", "text"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.fixture(scope="module")
def words():
    """A model, and a tokenizer that knows `<s>` and `</s>`."""
    return Subject(make_decoder("llama"), make_tokenizer(), {"source": "tiny"})


def nats_of(subject, ids, first):
    """The nats of the tokens from number `first` on, in one forward."""
    with torch.no_grad():
        logits = subject.model.double()(torch.tensor([ids])).logits[0, :-1]
    losses = -logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    return losses[first - 1 :].sum().item()


def test_the_name_of_a_special_token_in_a_document_is_text(words):
    text = "<s>The ferry</s> leaves"
    [row] = rows(words, [text], 48)
    pieces = words.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert not {0, 1} & set(pieces)
    assert words.tokenizer.decode(pieces) == text
    assert (row["bytes"], row["tokens"]) == (len(text), len(pieces))
    assert row["nats"] == pytest.approx(nats_of(words, [0, *pieces], 1), rel=1e-5)


def test_without_a_token_to_begin_with_the_first_character_is_only_read(words):
    """`é` is two tokens of this tokenizer, each half of a character; U+FFFD, which stands for a half, is three."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.tokenizer.backend_tokenizer)
    subject = Subject(words.model, tokenizer, {"source": "tiny"})
    texts = ["\ufffd\ufffdé!", "é and more", "The ferry leaves", "A", "é"]
    read = list(rows(subject, texts, 48))
    for text, row, (tokens, size) in zip(texts, read, [(8, 8), (2, 2), (1, None), (1, 1), (2, 2)], strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        size = len(tokenizer.convert_ids_to_tokens(ids[0])) if size is None else size
        assert (row["tokens"], row["bytes"]) == (len(ids) - tokens, len(text.encode()) - size)
        assert row["nats"] == pytest.approx(nats_of(subject, ids, tokens), rel=1e-5)
    bits = [row["nats"] / math.log(2) / row["bytes"] for row in read[:3]]  # nothing is predicted in the others
    assert (scores(read)[0].value, scores(read)[0].n) == (pytest.approx(np.mean(bits)), 3)
    with pytest.raises(ValueError, match="file: expected a document in which the model predicts a token"):
        scores(read[3:])


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa ferry")
    assert documents(TextSettings(file=str(tmp_path / "a.txt"))) == ["a ferry"]
    (tmp_path / "a.txt").rename(tmp_path / "A.TXT")
    assert documents(TextSettings(file=str(tmp_path / "A.TXT"))) == ["a ferry"]


def test_a_folder_of_a_model_may_have_an_equals_sign(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders / "a", tmp_path / "lr=3")
    assert main(["eval", "lr=3", "--suite", "text", str(folders / "my.jsonl"), "n=2"]) == 0
    assert len(results(tmp_path / "evals" / "lr=3")[1]) == 2

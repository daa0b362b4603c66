"""Capo's pieces: they are what the tokenizer makes of whole sentences, for our tokenizer and for others."""

import logging

import numpy as np
import pytest
from capo_folders import write_pools
from refusals import refused
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from canonlm import tasks
from canonlm.tasks.capo import tokens as capo_tokens
from canonlm.tasks.capo import train_tokenizer
from canonlm.tasks.capo.pools import ATTRIBUTES, DAYS, MONTHS, YEARS
from canonlm.tasks.capo.templates import QUESTIONS, TEMPLATES
from canonlm.tasks.capo.tokens import AFTER, ASK, ASKED, BETWEEN, DAY, FIRST, LAST, MIDDLE, MONTH, PRONOUN, VALUE, YEAR

TEXT = capo_tokens.tokenise()


def piece(kind, i):
    return TEXT.pieces.piece(TEXT.pieces.base[kind] + i)


def assert_joins(sentences, pieces):
    """The tokens of every sentence are those of its pieces, one after the other."""
    encodings = TEXT.vocab.tokenizer.encode_batch(sentences, add_special_tokens=False)
    for sentence, encoding, parts in zip(sentences, encodings, pieces, strict=True):
        joined = [int(TEXT.vocab.ids_of[token]) for part in parts for token in part]
        assert joined == encoding.ids, sentence


@pytest.mark.parametrize("a", range(1, 6), ids=ATTRIBUTES[1:])
def test_every_template_with_every_value(a):
    templates, values = TEMPLATES[ATTRIBUTES[a]], TEXT.pools.values[ATTRIBUTES[a]]
    pairs = [(t, v) for t in range(len(templates)) for v in range(len(values))]
    assert_joins(
        [" " + templates[t].format(subject=("He", "She")[v % 2], value=values[v]) for t, v in pairs],
        [[piece(PRONOUN, v % 2), piece(BETWEEN + a, t), piece(VALUE + a, v), piece(AFTER + a, t)] for t, v in pairs],
    )


def test_every_birth_date_template_with_every_month_day_and_year():
    dates = [(i, 0, 0) for i in range(12)] + [(0, i, 0) for i in range(28)] + [(0, 0, i) for i in range(200)]
    cases = [(t, *date) for t in range(len(TEMPLATES["birth date"])) for date in dates]
    assert_joins(
        [
            " " + TEMPLATES["birth date"][t].format(subject="He", value=f"{MONTHS[m]} {DAYS[d]}, {YEARS[y]}")
            for t, m, d, y in cases
        ],
        [
            [piece(PRONOUN, 0), piece(BETWEEN, t), piece(MONTH, m), piece(DAY, d), piece(YEAR, y), piece(AFTER, t)]
            for t, m, d, y in cases
        ],
    )


def test_every_name_and_every_question():
    pools = TEXT.pools
    sentences, pieces = [], []
    for a, attribute in enumerate(ATTRIBUTES):
        value = f" {pools.values[attribute][a]}" if a else " January 1, 1900"
        parts = [piece(VALUE + a, a)] if a else [piece(MONTH, 0), piece(DAY, 0), piece(YEAR, 0)]
        for i in range(1000):
            f, m = i % 400, (7 * i + a) % 400
            name = f"{pools.first[f]} {pools.middle[m]} {pools.last[i]}"
            of_name = [piece(FIRST, f), piece(MIDDLE, m), piece(LAST, i)]
            sentences.append(f" {QUESTIONS[attribute].format(name=name)}{value}")
            pieces.append([piece(ASK + a, 0), *of_name, piece(ASKED + a, 0), *parts])
            t = i % len(TEMPLATES[attribute])
            sentences.append(" " + TEMPLATES[attribute][t].format(subject=name, value=value.strip()))
            pieces.append([*of_name, piece(BETWEEN + a, t), *parts, piece(AFTER + a, t)])
    assert_joins(sentences, pieces)


def test_the_shipped_tokenizer_is_the_trained_one():
    trained = train_tokenizer.train()
    assert trained == train_tokenizer.train()
    shipped = capo_tokens.SHIPPED.read_text(encoding="utf-8")
    assert shipped == trained, "templates or pools are new: run python -m canonlm.tasks.capo.train_tokenizer"
    assert Tokenizer.from_str(trained).get_vocab_size() == 3275


def test_training_writes_a_file(tmp_path, capsys):
    train_tokenizer.main(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert (tmp_path / "tokenizer.json").read_bytes() == capo_tokens.SHIPPED.read_bytes()
    assert "tokenizer.json" in capsys.readouterr().out


def test_the_vocabulary_covers_the_texts():
    vocab = TEXT.vocab
    assert vocab.names[0] == "<bos>"
    assert vocab.markers == {0}
    assert sorted({int(token) for token in TEXT.pieces.tokens}) == list(range(1, len(vocab)))


def test_text_and_back():
    vocab = TEXT.vocab
    sentence = " He was born in Fairbank, VT. She works in Glenwick, MA."
    tokens = vocab.encode(sentence)
    assert vocab.text(tokens) == sentence.strip()
    assert vocab.text([0, *tokens, 0, 99999, None, -1, True, *tokens[:2]]) == (
        f"<bos> {sentence.strip()} <bos> <99999> <None> <-1> <True> He was"
    )
    assert vocab.text([]) == ""
    for foreign in ("naïve", "{}"):
        with pytest.raises(ValueError, match="text: expected only tokens that biographies have"):
            vocab.encode(foreign)


# -- other tokenizers -------------------------------------------------------------------------------------------------


def trained(tmp_path, extra=(), model=None, pre=None, normalizer=None, decoder=None):
    tokenizer = Tokenizer(model or models.BPE())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoder or decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*train_tokenizer.corpus(), *extra], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def few_pools(folder, companies="Acme Inc.; Oslo\nBolt; Rome\n"):
    """2 x 2 x 2 names and a few values, one company with a period."""
    names = {"first_name": "Ann\nBo\n", "middle_name": "Cy\nDi\n", "last_name": "Eck\nFoe\n"}
    return write_pools(folder, "Oslo\nRome\n", field="Law\nArt\n", company=companies, **names)


def documents(task):
    return [task.sample("train", 3, i, e) for i in range(8) for e in range(8)]


def test_a_sentencepiece_like_tokenizer(tmp_path):
    """A space becomes a letter, and one is put before the text, so pieces are right only in running text."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    file = trained(tmp_path, pre=metaspace, decoder=decoders.Metaspace(prepend_scheme="first"))
    pools = few_pools(tmp_path / "pools", "Bolt; Rome\nAmber; Oslo\n")
    task = tasks.get("capo", N=8, tokenizer=str(tmp_path), pools=str(pools), exposures=2)
    assert task.text.joined == 0
    tokenizer = Tokenizer.from_file(str(file))
    for sample in documents(task):
        text = task.vocab.text(sample.tokens[1:].tolist())
        running = tokenizer.encode(f". {text}", add_special_tokens=False)
        ids = [token for token, (_, stop) in zip(running.ids, running.offsets, strict=True) if stop > 1]
        assert task.vocab.ids_of[sample.tokens[1:]].tolist() == ids


def test_joined_sentences_are_tokenised_together(tmp_path, caplog):
    """Byte-level BPE splits "Inc.." into Inc and one token for both periods; other sentences split into pieces."""
    file = trained(tmp_path, extra=["Inc.."] * 50, pre=pre_tokenizers.ByteLevel(add_prefix_space=False))
    capo_tokens.tokenise.cache_clear()
    with caplog.at_level(logging.WARNING):
        pools = str(few_pools(tmp_path / "pools"))
        task = tasks.get("capo", N=8, tokenizer=str(file), pools=pools, exposures=3, questions=True)
    ending = sum(template.endswith("{value}.") for template in TEMPLATES["company"])
    assert 0 < ending < len(TEMPLATES["company"])
    assert task.text.joined == ending
    every = 2 * sum(len(TEMPLATES[attribute]) for attribute in ATTRIBUTES[1:])
    assert caplog.messages == [f"capo: {ending} of {every} pairs of template and value are tokenised as one text"]
    tokenizer, seen = Tokenizer.from_file(str(file)), set()
    for sample in documents(task):
        text = " " + task.vocab.text(sample.tokens[1:].tolist())
        assert task.vocab.encode(text) == sample.tokens[1:].tolist()
        assert len(tokenizer.encode(text).ids) == len(sample.tokens) - 1
        company = next(query for query in sample.queries if query.slice == {"attribute": "company"})
        seen.add(task.vocab.text(sample.tokens[company.start : company.stop].tolist()))
        assert len(sample.tokens) <= task.max_len
    assert {"Acme Inc..", "Bolt"} <= seen  # the period of the sentence is in the value's last token
    rows = task.sample_rows("train", 3, 0, 24)
    bounds = [(query.start, query.stop) for i in range(24) for query in task.sample("train", 3, i).queries]
    assert list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True)) == bounds
    windows = [task.windows("train", 3, w, 1, seq_len=20) for w in range(task.training_windows(3, 20))]
    assert [len(row.labels[row.labels != -100]) for row in windows].count(0) == 0
    stream = np.concatenate([row.input_ids[row.labels != -100] for row in windows])  # found by lengths alone
    parts = [part.tobytes() for part in np.split(stream, np.flatnonzero(stream == 0)[1:])]
    reported = [task.sample("train", 3, i, e) for i in range(8) for e in range(3)]
    questions = 3 * [task.question(3, i, attribute) for i in range(4) for attribute in ATTRIBUTES]
    assert sorted(parts) == sorted(sample.tokens.tobytes() for sample in reported + questions)


def test_names_that_a_tokenizer_joins(tmp_path):
    """Without a cut at spaces, "Foe was" can become one token."""
    file = trained(tmp_path, extra=["Foe was born"] * 50, normalizer=normalizers.NFC(), decoder=decoders.Fuse())
    line = "capo.tokenizer: expected a tokenizer that keeps names, dates and questions apart from the words around..."
    with refused(line):
        tasks.get("capo", N=8, tokenizer=str(file), pools=str(few_pools(tmp_path / "pools")))


@pytest.mark.parametrize("content", [None, "", "{}", "folder"])
def test_no_tokenizer(tmp_path, content):
    path = tmp_path / "there"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with refused("capo.tokenizer: expected a tokenizer.json, or a folder with a tokenizer, got ..."):
        tasks.get("capo", tokenizer=str(path))


@pytest.mark.slow
def test_a_folder_in_an_older_format(tmp_path):
    """vocab.json and merges.txt, as GPT-2's: transformers converts them."""
    Tokenizer.from_file(str(capo_tokens.SHIPPED)).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    pools = str(few_pools(tmp_path / "pools", "Bolt; Rome\n"))
    task, ours = tasks.get("capo", N=8, tokenizer=str(tmp_path), pools=pools), tasks.get("capo", N=8, pools=pools)
    assert task.sample("test", 0, 3).tokens.tolist() == ours.sample("test", 0, 3).tokens.tolist()

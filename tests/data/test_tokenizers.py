"""Tokenizer files of every kind, against the libraries whose formats they are."""

import base64
import itertools
import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from canonlm.data.prepare import prepare
from canonlm.data.tokenizers import bytes_tokenizer, from_file, load

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")
from tiktoken.load import load_tiktoken_bpe  # noqa: E402

CORPUS = [
    f"{subject} {verb} the {thing}, don't they? {number}"
    for subject, verb, thing, number in itertools.product(
        ["the cats", "All dogs", "a  bird", "we"], ["see", "saw", "are seeing"], ["sea", "seed", "house"], [1, 27, 1984]
    )
]
# Pieces that caused bugs: names of special and byte tokens, spaces at both ends, characters that no piece covers.
TEXTS = st.lists(
    st.sampled_from(["<s>", "</s>", "<0x0A>", "<unk>", "<|end_of_text|>", " ", "  ", "\n", "\t", "▁", "é", "漢", "😀",
                     "the", " see", "ing", "'t", "12345", "\x00", "\u0301"]) | st.text(max_size=5), max_size=12,
).map("".join)  # fmt: skip
EXACTLY = settings(max_examples=200)


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A small model like Llama 2's, with the settings of Llama 2's file."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


def ranks_file(path, tokens):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Byte pairs from a naive trainer, ranked in the order in which it found them."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in text.encode()] for text in CORPUS]
    for _ in range(60):
        pairs = [pair for word in words for pair in itertools.pairwise(word)]
        best = max(sorted(set(pairs)), key=pairs.count)
        tokens.append(b"".join(best))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if tuple(word[at : at + 2]) == best:
                    word[at : at + 2] = [tokens[-1]]
                at += 1
    return ranks_file(tmp_path_factory.mktemp("tiktoken") / "tokenizer.model", tokens)


@EXACTLY
@given(text=TEXTS)
def test_bytes_are_the_bytes(text):
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode(text).ids == list(text.encode("utf-8"))
    assert tokenizer.decode(list(text.encode("utf-8")), skip_special_tokens=False) == text


def test_the_byte_tokenizer_is_a_file_of_the_library(tmp_path):
    loaded = load("bytes")
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (258, 256, 257)
    loaded.tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load(tmp_path)
    assert (again.vocab_size, again.bos_id, again.eos_id) == (258, 256, 257)
    everything = bytes(range(256)).decode("latin-1")
    assert again.tokenizer.encode(everything).ids == list(everything.encode("utf-8"))


@EXACTLY
@given(text=TEXTS)
def test_a_sentencepiece_model_encodes_as_sentencepiece_does(spm, text):
    truth = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert _loaded(spm).tokenizer.encode(text, add_special_tokens=False).ids == truth.encode(text)


def test_a_sentencepiece_model_of_the_size_of_llama_2(spm, tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(spm.read_bytes())
    for number in range(32000 - len(model.pieces)):
        model.pieces.add(piece=f"the{number}", score=-1000.0 - number, type=1)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    loaded = load(tmp_path)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (32000, 1, 2)


@EXACTLY
@given(text=TEXTS)
def test_a_tiktoken_file_encodes_as_tiktoken_does(ranks, text):
    tokenizer = _loaded(ranks).tokenizer
    assert tokenizer.encode(text, add_special_tokens=False).ids == _tiktoken(ranks).encode(text, disallowed_special=())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_a_tiktoken_file_of_the_size_of_llama_3(tmp_path):
    letters = [bytes([byte]) for byte in range(256)]
    pairs = [left + right for left in letters for right in letters]
    triples = [pair + b"a" for pair in pairs]
    ranks_file(tmp_path / "tokenizer.model", [*letters, *pairs, *triples][:128000])
    loaded = load(tmp_path / "tokenizer.model")
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (128256, 128000, 128001)
    names = {"<|begin_of_text|>": 128000, "<|start_header_id|>": 128006, "<|eot_id|>": 128009}
    assert {name: loaded.tokenizer.token_to_id(name) for name in names} == names
    assert loaded.tokenizer.token_to_id("<|reserved_special_token_250|>") == 128255


def test_a_file_may_not_cut_pad_or_end_a_document(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "[PAD]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token="[PAD]", pad_id=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert from_file(tmp_path / "tokenizer.json").encode("a " * 6 + "</s>").ids == [0] * 6 + [1]


def test_characters_that_would_be_lost_are_named(tmp_path):
    """The library leaves them out without an error; with an unk_token they are that token."""
    lossy = Tokenizer(models.BPE({letter: number for number, letter in enumerate("abc?")}, []))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    assert lossy.encode("ab xé").ids == [0, 1]
    (tmp_path / "texts.jsonl").write_text('{"text": "cab"}\n{"text": "ab x\\u00e9"}\n')

    def prepared(name):
        lossy.save(str(tmp_path / f"{name}.json"))
        arguments = {"tokenizer": tmp_path / f"{name}.json", "bos": False, "eos": False, "workers": 1}
        return prepare(tmp_path / name, [str(tmp_path / "texts.jsonl")], **arguments).splits["train"][0]

    with pytest.raises(ValueError, match=r"^--tokenizer: expected a tokenizer that knows x é, or has an unk_token: "):
        prepared("lossy")
    lossy.model.unk_token = "?"
    assert prepared("whole").tokens == 3 + 4


def test_names_of_bos_and_eos_may_be_in_a_file_beside_it(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<go>": 3, "<stop>": 4}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path)[1:] == (1, 2)
    config = {"bos_token": {"content": "<go>", "lstrip": False}, "eos_token": "<stop>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path)[1:] == (3, 4)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<stop>"}))
    assert load(tmp_path)[1:] == (None, 4)


def test_files_that_are_not_tokenizers(tmp_path, spm):
    for name, content in {"a": b"", "b.json": b"{}", "c": b"\xff\x00\x12garbage", "d": b"IQ== 0\nIQ= x y\n"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"--tokenizer: expected .*") as refused:
            load(tmp_path / name)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="a folder"):
        load(tmp_path)


def test_a_sentencepiece_model_that_changes_text_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "tokenizer"), vocab_size=40, minloglevel=2
    )
    with pytest.raises(ValueError, match="like Llama 2's"):
        load(tmp_path / "tokenizer.model")


def test_a_package_that_is_missing_is_named(ranks, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package tiktoken: pip install 'canonlm\[data\]'"):
        load(ranks)


@cache
def _loaded(path):
    return load(path)


@cache
def _tiktoken(path):
    """The file as the library reads it, with Llama 3's pattern for splitting words."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(path)), special_tokens={})

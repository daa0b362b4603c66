"""Reads four kinds of tokenizers, each as a `tokenizers.Tokenizer` with the ids that start and end a document.

    bytes                       built in: the 256 bytes, <bos> and <eos>; a vocabulary of 258
    tokenizer.json              Hugging Face's own format
    tokenizer.model, tiktoken   byte pairs in base64 with their ranks, as Llama 3's (special tokens after the ranks)
    tokenizer.model             a sentencepiece model, as Llama 2's (byte pairs with a fallback to bytes)

Whatever its file says, a tokenizer never truncates or pads a text, and it reads the name of a special token in a text
as plain text. So a text cannot end a document by containing `</s>`.
"""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from canonlm.core.errors import Panic, expected, panics_raised
from canonlm.core.extras import needed
from canonlm.core.untrusted import MAX_BYTES, open_regular, path_inside, read_bytes, read_object, read_text
from canonlm.data.index import MAX_VOCAB

BOS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
EOS = ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>")
"""Names of the token that starts (ends) a document: without a tokenizer_config.json, the first one that exists."""

SENTENCEPIECE_NORMAL, SENTENCEPIECE_BPE = 1, 2  # numbers of sentencepiece_model.proto
SPACE = "▁"  # how sentencepiece writes a space
LONGEST = 2**10  # max characters of a sentencepiece piece; usually they have up to 16


class Loaded(NamedTuple):
    """A tokenizer. `bos_id` and `eos_id` are None if it has no such token."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load(source: str | Path) -> Loaded:
    """Read `bytes`, a file, or a folder with tokenizer.json or tokenizer.model. ValueError for anything else."""
    if str(source) == "bytes":
        return _named(bytes_tokenizer(), ["<bos>"], ["<eos>"])
    path = Path(source)
    if path.is_dir():
        names = (name for name in ("tokenizer.json", "tokenizer.model") if (path / name).exists())
        path = next((path_inside(path, name) for name in names), path)
    try:
        with open_regular(path) as file:
            first = file.readline(4096)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise expected("--tokenizer", f"bytes, or a tokenizer file ({reason})", str(source)) from None
    if first.lstrip().startswith(b"{"):
        loaded = _named(_hugging_face(path), *_configured(path))
    elif _is_ranks(first):
        loaded = _named(_tiktoken(path), ["<|begin_of_text|>"], ["<|end_of_text|>"])
    else:
        loaded = _sentencepiece(path)
    ids = loaded.tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= MAX_VOCAB:
        raise expected("--tokenizer", f"1 to {MAX_VOCAB:,} tokens", f"{path}, with {max(ids, default=-1) + 1}")
    return loaded


def from_file(path: Path) -> Tokenizer:
    """A tokenizer.json, ready to encode whole documents. ValueError: it cannot be read, or has more than MAX_BYTES.
    (For other errors, the library raises nothing narrower than Exception.)"""
    with panics_raised(path):
        return _strict(Tokenizer.from_str(read_text(path)))


def bytes_tokenizer() -> Tokenizer:
    """Ids 0 … 255 are the bytes of the text in UTF-8; 256 is <bos>, 257 is <eos>."""
    # ByteLevel writes a printable byte as the character of that number, the others as 256, 257, … in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    tokenizer = Tokenizer(BPE({chr(b) if b in printable else chr(256 + hidden.index(b)): b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_special("<bos>"), _special("<eos>")])
    return _strict(tokenizer)


def _named(tokenizer: Tokenizer, bos: list[str], eos: list[str]) -> Loaded:
    ids = [[tokenizer.token_to_id(name) for name in names] for names in (bos, eos)]
    return Loaded(tokenizer, *(next((id for id in candidates if id is not None), None) for candidates in ids))


def _configured(path: Path) -> tuple[list[str], list[str]]:
    """The names of BOS and EOS tokens, from a tokenizer_config.json beside the file if there is one."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.exists():
        return list(BOS), list(EOS)
    config, names = read_object(beside), []
    for key in ("bos_token", "eos_token"):
        name = config.get(key)
        name = name.get("content") if isinstance(name, dict) else name
        if name is not None and not isinstance(name, str):
            raise expected(f"{beside}: {key}", "the name of a token", name)
        names.append([name] if name else [])
    return names[0], names[1]


def _hugging_face(path: Path) -> Tokenizer:
    try:
        return from_file(path)
    except Panic:
        raise
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())[:200]
        raise expected("--tokenizer", f"a tokenizer.json ({reason})", str(path)) from None


def _is_ranks(line: bytes) -> bool:
    """Whether this is the first line of a tiktoken file, such as `IQ== 0`."""
    parts = line.split()
    return len(parts) == 2 and parts[1].isdigit() and len(parts[0]) % 4 == 0 and parts[0].isascii()


def _tiktoken(path: Path) -> Tokenizer:
    needed("tiktoken", f"the tiktoken file {path}")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise expected("--tokenizer", f"a file of at most {MAX_BYTES:,} bytes, not {size:,}", str(path))
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # The names that Llama 3 gives to its 256 special tokens: 128000 … 128255, after the 128000 ranks.
    start = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4))]
    start += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"]
    names = [*start, *(f"reserved_special_token_{i}" for i in range(5, 251))]
    try:
        converter = TikTokenConverter(str(path), extra_special_tokens=[f"<|{name}|>" for name in names])
        return _strict(converter.converted())
    except Exception as error:  # a line that is not base64, a rank that is missing, …
        raise expected("--tokenizer", f"a tiktoken file ({' '.join(str(error).split())})", str(path)) from None


def _sentencepiece(path: Path) -> Loaded:
    needed("sentencepiece", f"the sentencepiece model {path}")
    needed("google.protobuf", f"the sentencepiece model {path}", package="protobuf")
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    model, content = proto.ModelProto(), read_bytes(path)  # type: ignore[attr-defined]
    try:
        model.ParseFromString(content)
    except DecodeError:
        what = "bytes, a tokenizer.json, a tiktoken file or a sentencepiece model"
        raise expected("--tokenizer", what, str(path)) from None
    trainer, rules = model.trainer_spec, model.normalizer_spec
    like_llama = trainer.model_type == SENTENCEPIECE_BPE and trainer.byte_fallback and not rules.precompiled_charsmap
    if not like_llama or rules.remove_extra_whitespaces:
        what = "a sentencepiece model like Llama 2's (BPE, byte fallback, text left as it is), or its tokenizer.json"
        raise expected("--tokenizer", what, str(path))
    special = [trainer.unk_id, trainer.bos_id, trainer.eos_id]
    longest = max((len(piece.piece) for piece in model.pieces), default=0)
    if longest > LONGEST or not 0 <= trainer.unk_id < len(model.pieces) or max(special) >= len(model.pieces):
        what = f"a sentencepiece model with pieces of at most {LONGEST} characters, and its special tokens among them"
        raise expected("--tokenizer", what, str(path))
    pieces = {piece.piece: id for id, piece in enumerate(model.pieces)}
    merges = _merges({p.piece: p.score for p in model.pieces if p.type == SENTENCEPIECE_NORMAL}, pieces)
    unknown = model.pieces[trainer.unk_id].piece
    tokenizer = Tokenizer(BPE(pieces, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if rules.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    ids = {"unk": trainer.unk_id, "bos": trainer.bos_id, "eos": trainer.eos_id}
    tokenizer.add_special_tokens([_special(model.pieces[id].piece) for id in sorted(ids.values()) if id >= 0])
    bos, eos = (None if ids[name] < 0 else ids[name] for name in ("bos", "eos"))
    return Loaded(_strict(tokenizer), bos, eos)


def _merges(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to merge two pieces into one, the highest score first, as sentencepiece merges them."""
    ways = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(ways)]


def _special(name: str) -> AddedToken:
    return AddedToken(name, normalized=False, special=True)


def _strict(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer

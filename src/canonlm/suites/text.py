"""Compares models on documents: bits per byte and perplexity, with differences paired by document.

A model reads each document with its own tokenizer, after its BOS (else EOS) token; without either, the tokens of the
first character are only read. A document longer than the context is read in windows that overlap by half, so that a
token follows at least half a context. Bits per byte compare models with different tokenizers, as a document has the
same bytes for all.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from canonlm.core.errors import expected
from canonlm.core.untrusted import SURROGATE, is_unicode, parse_json, read_bytes
from canonlm.core.user_folders import expanded
from canonlm.models.build import wrap
from canonlm.runs.answers import Row
from canonlm.runs.documents import bits_per_byte
from canonlm.suites.load_model import Subject
from canonlm.suites.questions import Score
from canonlm.suites.settings import TextSettings

MAX_TEXT = 2**30
"""Max bytes of a file of documents."""

DEFAULT_CONTEXT = 2048
LOGITS = 2**26  # of the windows that a model reads at once
FIRST = 16  # tokens before a token, up to which positions are counted together


def documents(settings: TextSettings) -> list[str]:
    """The texts. ValueError for a file that cannot be read, and for a line without a text; it names the line."""
    path = expanded(settings.file)
    content, suffix = read_bytes(path, MAX_TEXT), path.suffix.lower()
    if suffix == ".txt":
        lines = [(str(path), content)]
    else:
        lines = [
            (f"{path}, line {number}", line) for number, line in enumerate(content.splitlines(), 1) if line.strip()
        ]
    texts = [_text(place, line, settings, suffix) for place, line in lines[: settings.n]]
    if not texts:
        raise expected("file", "a file with documents", settings.file)
    return texts


def _text(place: str, line: bytes, settings: TextSettings, suffix: str) -> str:
    try:
        text = line.decode("utf-8-sig") if suffix == ".txt" else parse_json(line, place)
    except UnicodeDecodeError:
        raise ValueError(f"{place}: expected text in UTF-8") from None
    if isinstance(text, dict):
        if settings.text_key not in text:
            raise expected("text_key", f"one of the keys in {place} ({', '.join(list(text)[:20])})", settings.text_key)
        text = text[settings.text_key]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{place}: expected an object with a text that is not empty")
    if not is_unicode(text):
        raise expected(place, f"text without {SURROGATE}", text)
    return text


def context_of(subject: Subject, settings: TextSettings) -> int:
    """The tokens of a window. ValueError for more than the model reads."""
    limit = wrap(subject.model).context_length
    if settings.context is not None and limit is not None and settings.context > limit:
        raise expected("context", f"at most {limit}, the model's", settings.context)
    return settings.context or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)


def rows(
    subject: Subject,
    texts: Sequence[str],
    context: int,
    batch_size: int | None = None,
    on_document: Callable[[int], None] = lambda number: None,
    done: Collection[int] = (),
) -> Iterator[Row]:
    """For each document whose index is not in `done`: `bytes`, `tokens` and `nats`, and `positions`, which are `{min
    tokens before: [nats, tokens]}`."""
    words: Any = subject.tokenizer
    begin = words.bos_token_id if words.bos_token_id is not None else words.eos_token_id
    for index, text in ((index, text) for index, text in enumerate(texts) if index not in done):
        # The name of a special token in a document is text, as in training.
        plain = words(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        ids, read, size = [begin, *plain], 1, len(text.encode())
        if begin is None:
            ids, read, size = plain, *_first_characters(words, plain, text)
        positions: dict[str, list[float]] = {}
        for before, nats in islice(_losses(subject, ids, context, batch_size), read - 1, None):
            place = positions.setdefault(str(0 if before < FIRST else 1 << (before.bit_length() - 1)), [0.0, 0])
            place[0], place[1] = place[0] + nats, place[1] + 1
        total, count = (sum(place[i] for place in positions.values()) for i in (0, 1))
        if not math.isfinite(total):
            raise ValueError(f"{subject.about['source']}: its logits are not finite (NaN) in document {index + 1}")
        yield {"index": index, "slice": {}, "right": {}, "bytes": size, "tokens": int(count), "nats": total,
               "positions": positions}  # fmt: skip
        on_document(index + 1)


def _first_characters(words: Any, ids: list[int], text: str) -> tuple[int, int]:
    """The number of tokens that are the first characters of the text, as a token may be a part of one; and the bytes
    after them."""
    marks = len(text) - len(text.lstrip("\ufffd"))  # of the text itself: they look like parts of a character
    for read in range(1, len(ids) + 1):
        start = words.decode(ids[:read])
        if len(start) > marks and "\ufffd" not in start[marks:]:
            return read, len(text.encode()) - len(start.encode())
    return len(ids), 0


@torch.no_grad()
def _losses(subject: Subject, ids: list[int], context: int, batch_size: int | None) -> Iterator[tuple[int, float]]:
    """For each token but the first: the number of tokens before it in its window, and its cross-entropy in nats."""
    step = max(1, context // 2)
    starts = [0, *range(step, len(ids) - context + step, step)] if len(ids) > context else [0]
    windows = [torch.tensor(ids[start : start + context]) for start in starts]
    vocab = subject.model.config.get_text_config().vocab_size
    at_once = batch_size or max(1, LOGITS // (context * vocab))
    for first in range(0, len(windows), at_once):
        part = windows[first : first + at_once]
        # Padded on the right without a mask: in a causal model, what follows a token does not change its prediction.
        padded = pad_sequence(part, batch_first=True).to(subject.model.device)
        logits = wrap(subject.model).logits(padded)[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2).float(), padded[:, 1:], reduction="none").double().tolist()
        for number, (window, row) in enumerate(zip(part, losses, strict=True), first):
            seen = 1 if number == 0 else context - step  # tokens that the window before predicted, or read first
            yield from ((before, row[before - 1]) for before in range(seen, len(window)))


def scores(read: Sequence[Row]) -> list[Score]:
    """Bits per byte: the mean over documents, with its standard error. Perplexity of all tokens. Nats by position."""
    bits = [bits_per_byte(row) for row in read if row["tokens"]]
    if not bits:
        raise expected("file", "a document in which the model predicts a token", "documents that are only read")
    error = statistics.stdev(bits) / math.sqrt(len(bits)) if len(bits) > 1 else None
    options: dict[str, Any] = {"higher_is_better": False, "share": False}
    loss = sum(row["nats"] for row in read) / max(1, sum(row["tokens"] for row in read))
    results = [
        Score("bits_per_byte", statistics.mean(bits), error, len(bits), **options),
        Score("perplexity", math.exp(min(loss, 700.0)), None, len(bits), **options),
    ]
    for position in sorted({int(place) for row in read for place in row["positions"]}):
        nats, tokens = (sum(row["positions"].get(str(position), (0, 0))[i] for row in read) for i in (0, 1))
        results.append(Score("loss", nats / tokens, None, int(tokens), {"position": position}, **options))
    return results

"""Encodes texts, long ones in pieces: the library keeps some 130 bytes per token until a text is done, and encodes a
text in one thread.

A text is cut only where that changes no token:

- anywhere, if every byte is a token and nothing merges them (the built-in `bytes`);
- between a letter and a space before a letter (of a … z), for BPE tokenizers whose pre-tokenizer is one of PATTERNS. No
  alternative of these expressions matches a space after a letter, so a match ends there anyway; none looks behind, so
  the rest is matched as if it began there; and pairs are merged within a match only.

For other tokenizers, texts are not cut.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from canonlm.core.errors import expected, panics_raised

LONG = 2**20
"""Max characters of a text that is not cut. Up to twice as many are encoded together."""

PIECE = 2**18
"""Min characters of a piece, which ends at the next place where a text may be cut."""

UNKNOWN = "<not a token>"
"""The library leaves out characters that a BPE does not know, unless the BPE names a token for them. With a name that
is not a token, it fails."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,  # GPT-4, Llama 3
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,  # Qwen 2 and 3
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2, as ByteLevel has it
)

_ANYWHERE = re.compile("")
_BEFORE_A_SPACE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")


class Encoder:
    """Encodes texts with a tokenizer; cuts long ones where that changes no token."""

    def __init__(
        self, tokenizer: Tokenizer, file: object = "--tokenizer", *, long: int = LONG, piece: int = PIECE
    ) -> None:
        """file: the tokenizer's, for errors. long, piece: characters of a text that is cut, and of its pieces."""
        self._tokenizer, self._file, self._long, self._piece = tokenizer, file, long, piece
        if isinstance(tokenizer.model, BPE) and tokenizer.model.unk_token is None:
            tokenizer.model.unk_token = UNKNOWN

    def encode(self, texts: Iterable[str]) -> Iterator[tuple[int, list[int]]]:
        """(number of the text, tokens), the texts in order; those of a long text in several parts."""
        group: list[tuple[int, str]] = []
        length = 0
        for number, text in enumerate(texts):
            for piece in self.pieces(text):
                if group and length + len(piece) > 2 * self._long:
                    yield from self._encode(group)
                    group, length = [], 0
                group.append((number, piece))
                length += len(piece)
        yield from self._encode(group)

    def pieces(self, text: str) -> list[str]:
        """The text in pieces, if it is long and may be cut."""
        if len(text) <= self._long or (places := self._cut_places) is None:
            return [text]
        cuts = [0]
        while len(text) - cuts[-1] > self._piece and (place := places.search(text, cuts[-1] + self._piece)):
            cuts.append(place.start())
        return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _encode(self, group: list[tuple[int, str]]) -> Iterator[tuple[int, list[int]]]:
        texts = [piece for _, piece in group]
        try:
            with panics_raised(self._file):
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            if UNKNOWN not in str(error):
                raise
            lost = " ".join(filter(self._is_lost, sorted(set().union(*texts))))[:100] or "every character"
            what = f"a tokenizer that knows {lost}, or has an unk_token: they would be missing"
            raise expected("--tokenizer", what, str(self._file)) from None
        for (number, _), encoding in zip(group, encoded, strict=True):
            yield number, encoding.ids

    def _is_lost(self, character: str) -> bool:
        try:
            self._tokenizer.encode(character, add_special_tokens=False)
        except Exception:
            return True
        return False

    @cached_property  # at the first long text: a large vocabulary takes a second
    def _cut_places(self) -> re.Pattern[str] | None:
        return _places(self._tokenizer)


def _places(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    if not tokenizer.encode_special_tokens or not all(t.special for t in tokenizer.get_added_tokens_decoder().values()):
        return None  # the tokenizer finds names of tokens in a text, and they may contain a space
    parts = json.loads(tokenizer.to_str())
    model, before = parts["model"], parts["pre_tokenizer"]
    if model["type"] != "BPE" or model["dropout"] or before is None or parts["truncation"] or parts["padding"]:
        return None
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    if any(step["type"] == "ByteLevel" and step["add_prefix_space"] for step in steps):
        return None
    normalizer = parts["normalizer"]
    if not model["merges"]:
        one = steps[0]
        plain = len(steps) == 1 and one["type"] == "ByteLevel" and not one["use_regex"] and normalizer is None
        return _ANYWHERE if plain and _is_of_bytes(model) else None
    if normalizer is not None and normalizer["type"] != "NFC":  # which composes nothing with a space
        return None
    return _BEFORE_A_SPACE if _splits(steps) else None


def _is_of_bytes(model: dict[str, Any]) -> bool:
    """Whether every byte is a token, so that nothing is unknown or fused."""
    if model["unk_token"] not in (None, UNKNOWN) or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    return len(model["vocab"]) == 256 and all(len(token) == 1 for token in model["vocab"])


def _splits(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps split texts by one of PATTERNS, and then into bytes."""
    if len(steps) == 1:
        return steps[0]["type"] == "ByteLevel" and steps[0]["use_regex"]
    if len(steps) != 2 or steps[1]["type"] != "ByteLevel" or steps[1]["use_regex"] or steps[0]["type"] != "Split":
        return False
    split = steps[0]
    return split["behavior"] == "Isolated" and not split["invert"] and split["pattern"].get("Regex") in PATTERNS

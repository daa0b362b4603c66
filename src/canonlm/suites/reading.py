"""Text files that a setting or an option names."""

import re
from pathlib import Path

from canonlm.core.errors import expected
from canonlm.core.untrusted import read_bytes

MAX_BYTES = 2**30
"""Max bytes of a text, which is held in memory."""


def content_of(path: Path, key: str, what: str) -> bytes:
    """The bytes of a regular file. ValueError, with the `key` and `what` is expected of it."""
    try:
        return read_bytes(path, MAX_BYTES)
    except ValueError as error:
        reason = re.sub(r"^cannot be read \((.*)\)$", r"\1", str(error).removeprefix(f"{path}: "))
        raise expected(key, f"{what} ({reason})", str(path)) from None


def text_of(path: Path, key: str, what: str) -> str:
    """The same as text in UTF-8, without a byte order mark."""
    content = content_of(path, key, what)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise expected(key, f"{what} (line {line} is not UTF-8)", str(path)) from None

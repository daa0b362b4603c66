"""CSV that a spreadsheet can open: a text that it would take for a formula gets an apostrophe before it.

A formula in a stranger's run name could send the sheet's numbers away. The scripts of the pages do the same
(`guarded` in web/draw.js), and `read_csv` removes the apostrophes.
"""

import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canonlm.core import untrusted
from canonlm.experiments.tidy import SCHEMA

if TYPE_CHECKING:
    import polars as pl

_RUN = r"^['=+\-@\t\r\n]"  # an apostrophe is doubled, so that reading keeps it
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"  # not a formula


def guarded(text: str) -> str:
    """The text, with an apostrophe before it if a spreadsheet would run it. Numbers are unchanged."""
    return f"'{text}" if re.match(_RUN, text) and not re.fullmatch(_NUMBER, text) else text


def write_rows(rows: Iterable[Iterable[Any]]) -> str:
    """Rows of texts and numbers as CSV; None is an empty cell."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def write_frame(frame: "pl.DataFrame") -> str:
    """A frame as CSV."""
    import polars as pl

    text = pl.col(pl.String)
    run = text.str.contains(_RUN) & ~text.str.contains(_NUMBER)
    return frame.with_columns(pl.when(run).then("'" + text).otherwise(text).name.keep()).write_csv()


def read_csv(file: str | Path) -> "pl.DataFrame":
    """A file of `canonlm results --csv` as a frame, with its original texts. OSError: the file cannot be read."""
    return read_text(untrusted.read_text(Path(file)))


def read_text(text: str) -> "pl.DataFrame":
    """The same for the content of a file."""
    import polars as pl

    types = {name: getattr(pl, kind) for name, kind in SCHEMA.items()}
    known = {name: types[name] for name in text.partition("\n")[0].split(",") if name in types}
    frame = pl.read_csv(StringIO(text), schema_overrides=known, infer_schema_length=None)
    return frame.with_columns(pl.col(pl.String).str.strip_prefix("'"))


def _cell(value: Any) -> str:
    text = "" if value is None else guarded(value) if isinstance(value, str) else repr(value)
    return '"' + text.replace('"', '""') + '"' if re.search('[",\n\r]', text) else text

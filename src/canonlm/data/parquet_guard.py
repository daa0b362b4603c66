"""Refuses Parquet files that grow more than a hundredfold when read, and would not fit into memory.

A Parquet reader takes one page of a column at a time and allocates as much memory as the page's header says, up to
2 GB, whatever its size in the file. So the headers (Thrift's compact protocol) are read first.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAX_PAGE = 2**28
"""Max bytes of a decompressed page that grows more than MAX_GROWTH times."""

MAX_GROWTH = 100

HEADER = 2**16  # max bytes of a header; its statistics take at most a few thousand
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_DEPTH = 10  # max nesting of structures


class Page(NamedTuple):
    header: int  # bytes
    compressed: int
    uncompressed: int


def check_pages(file: IO[bytes], table: pq.ParquetFile, group: int, columns: tuple[str, ...]) -> int:
    """The size of all pages of these columns (or nested in them) in a row group, decompressed. ValueError if a page is
    damaged or grows too much."""
    described, total = table.metadata.row_group(group), 0
    for number in range(described.num_columns):
        chunk = described.column(number)
        # A name may have dots of its own.
        if any(chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in columns):
            for page in _pages(file, chunk):
                if page.uncompressed > max(MAX_PAGE, MAX_GROWTH * page.compressed):
                    sizes = f"{page.compressed:,} bytes that become {page.uncompressed:,}"
                    raise ValueError(f"a page of {sizes}; expected at most {MAX_GROWTH} times as many, or {MAX_PAGE:,}")
                total += page.uncompressed
    return total


def check_texts(table: pq.ParquetFile, group: int, column: str, size: int) -> None:
    """ValueError if the texts of a column in a row group are much more than the file's `size`: a dictionary holds a
    text once that a million rows may repeat. The table must be opened with the column in `read_dictionary`."""
    total, limit = 0, max(MAX_PAGE, MAX_GROWTH * size)
    for batch in table.iter_batches(10_000, row_groups=[group], columns=[column]):
        for texts in batch.columns:
            if pa.types.is_dictionary(texts.type):
                total += pc.sum(pc.take(pc.binary_length(texts.dictionary), texts.indices)).as_py() or 0
        if total > limit:
            raise ValueError(f"more than {limit:,} bytes of text in a file of {size:,}")


def _pages(file: IO[bytes], chunk: Any) -> Iterator[Page]:
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset]
    at = min(start for start in starts if start)
    end = at + chunk.total_compressed_size
    while at < end:
        file.seek(at)
        try:
            page = _header(file.read(HEADER))
        except (IndexError, RecursionError):
            page = Page(0, -1, -1)
        if page.compressed < 0 or page.uncompressed < 0:
            raise ValueError("a page without a header")
        yield page
        at += page.header + page.compressed


def _header(content: bytes) -> Page:
    """Fields 2 and 3 of a PageHeader are its sizes."""
    sizes = {2: -1, 3: -1}
    reader = _Compact(content)
    for field, kind in reader.fields():
        if field in sizes and kind in _INTEGERS:
            sizes[field] = reader.integer()
        else:
            reader.skip(kind)
    return Page(reader.at, sizes[3], sizes[2])


class _Compact:
    """A reader of Thrift's compact protocol. IndexError: the content is cut off, or is something else."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            value |= ((byte := self.byte()) & 0x7F) << shift
            if byte < 0x80:
                return value
        raise IndexError

    def integer(self) -> int:
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)

    def fields(self) -> Iterator[tuple[int, int]]:
        field = 0
        while head := self.byte():
            delta, kind = head >> 4, head & 0x0F
            field = field + delta if delta else self.integer()
            yield field, kind

    def skip(self, kind: int, depth: int = 0) -> None:
        if depth > _DEPTH:
            raise IndexError
        if kind == _BYTE:
            self.at += 1
        elif kind in _INTEGERS:
            self.unsigned()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            length = self.unsigned()
            self.at += length
        elif kind in _LISTS:
            head = self.byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self.unsigned()):
                self.skip(_BYTE if head & 0x0F in _BOOLEANS else head & 0x0F, depth + 1)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind not in _BOOLEANS:
            raise IndexError

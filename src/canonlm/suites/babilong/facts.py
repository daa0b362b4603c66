"""Stories from elsewhere: the public Babilong dataset, or a copy of it in local files.

A row has three texts: `input` (the sentences), `question` and `target` (the answer, a word or two).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected
from canonlm.core.extras import needed
from canonlm.core.untrusted import SURROGATE, is_unicode, open_regular, parse_json
from canonlm.core.user_folders import expanded
from canonlm.data.parquet_guard import MAX_GROWTH, MAX_PAGE, check_pages, check_texts
from canonlm.suites.babilong.world import Story
from canonlm.suites.reading import content_of

HUB = "RMT-team/babilong-1k-samples"
SUFFIXES = (".jsonl", ".json", ".parquet")
FIELDS = ("input", "question", "target")


def read(facts: str, task: str, config: str, padded: bool) -> list[Story]:
    """The stories of a task, in order.

    facts: "hub", or a folder. config: "0k", "1k", …: the dataset's configuration, the length of its texts. padded: the
    texts have other sentences among the facts and stay as they are; else each sentence is a fact.

    ValueError if there are no stories, or if one of the three texts of a row is missing.
    """
    rows = _of_hub(task, config) if facts == "hub" else _of_folder(expanded(facts), task, config, padded)
    stories = []
    for where, row in rows:
        texts = {key: row.get(key) for key in FIELDS} if isinstance(row, dict) else dict.fromkeys(FIELDS)
        for key, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                raise expected("facts", f"a text as {key} in {where}", text)
            if not is_unicode(text):
                raise expected("facts", f"text without {SURROGATE}, as {key} in {where}", text)
        text, question, answer = (str(text).strip() for text in texts.values())
        sentences = (text,) if padded else tuple(re.split(r"(?<=[.!?])\s+", text))
        stories.append(Story(sentences, " ".join(question.split()), answer))
    if not stories:
        raise expected("facts", f"at least one row for {task}", facts)
    return stories


def _of_hub(task: str, config: str) -> Iterator[tuple[str, Any]]:
    needed("datasets", "facts=hub")
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = list(datasets.load_dataset(HUB, config, split=task))
    except Exception as error:  # errors of the Hub, the network or the data, of many classes
        reason = " ".join(str(error).split())
        load = f"load_dataset('{HUB}', '{config}', split='{task}').to_json('babilong/{config}/{task}.jsonl')"
        what = (
            f"a dataset that can be reached ({reason}). Where there is a network, `from datasets import load_dataset; "
            f"{load}` makes a file; with it here, use facts=babilong. Or use facts=simulator, which needs no files"
        )
        raise expected("facts", what, "hub") from None
    return ((f"row {number} of {HUB}, {config}, {task}", row) for number, row in enumerate(rows, 1))


def _of_folder(folder: Path, task: str, config: str, padded: bool) -> Iterator[tuple[str, Any]]:
    if not folder.is_dir():
        raise expected("facts", "simulator, hub, or a folder", str(folder))
    for home in (folder / config,) if padded else (folder / config, folder):
        single_files = [file for suffix in SUFFIXES if os.path.lexists(file := home / f"{task}{suffix}")]
        if files := single_files[:1] or sorted(home.glob(f"{task}-*.parquet")):  # the second is how the Hub names them
            return (row for file in files for row in (_table(file) if file.suffix == ".parquet" else _lines(file)))
    what = f"a folder with {config}/{task}.jsonl or .parquet"
    raise expected("facts", what if padded else f"{what}, or {task}.jsonl or .parquet", str(folder))


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content_of(file, "facts", "a file that can be read").splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line.decode("utf-8"), "")
            except ValueError as error:  # not UTF-8, or not JSON
                reason = str(error).removeprefix(": ")
                raise expected("facts", f"a JSON object in UTF-8 as line {number} ({reason})", str(file)) from None
            yield f"{file}, line {number}", row


def _table(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Any] = []
    try:
        with open_regular(file) as opened:
            size, total = os.fstat(opened.fileno()).st_size, 0
            table = pq.ParquetFile(opened, read_dictionary=list(FIELDS))
            for group in range(table.num_row_groups):
                total += check_pages(opened, table, group, FIELDS)
                if total > max(MAX_PAGE, MAX_GROWTH * size):
                    raise ValueError(f"{total:,} bytes in a file of {size:,}")
                for field in FIELDS:
                    check_texts(table, group, field, size)
                rows += table.read_row_group(group, columns=list(FIELDS)).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise expected("facts", f"a Parquet file that can be read ({reason})", str(file)) from None
    return ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))

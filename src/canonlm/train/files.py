"""Files that are whole or not there: written under a temporary name, flushed to disk, renamed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` with what `fill(folder)` writes into it; a folder of that name is replaced."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        shutil.rmtree(path, ignore_errors=True)
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

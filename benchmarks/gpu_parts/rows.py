"""What a group yields, and the file that holds it: `<folder>/<group>.json`, whole after every row."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Missing(Exception):
    """A group cannot run here; the text says in one line what is missing."""


@dataclass
class Row:
    """One number. `value` is None where it is not available; `note` then says why.

    target: what the number should be, such as ">= 0.85" or "0.8 to 1.25"; such rows form the last table.
    """

    name: str
    settings: dict[str, Any]
    value: float | None
    unit: str
    note: str = ""
    target: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or a value."""
        if not self.target or self.value is None:
            return None
        match self.target.split():
            case [">=", low]:
                return self.value >= float(low)
            case ["<=", high]:
                return self.value <= float(high)
            case [low, "to", high]:
                return float(low) <= self.value <= float(high)
        raise ValueError(f'target: expected ">= 1", "<= 1" or "0.8 to 1.25", got "{self.target}"')

    def __str__(self) -> str:
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        more = "".join(f"   {key} {readable(value)}" for key, value in self.more.items())
        value = f"not available: {self.note}" if self.value is None else f"{readable(self.value)} {self.unit}"
        target = "" if not self.target else f"   target {self.target}: {'met' if self.met else 'missed'}"
        return f"  {self.name:32} {settings:54} {value}{more}{target}"


def readable(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def not_available(name: str, settings: dict[str, Any], error: Exception | str) -> Row:
    return Row(name, settings, None, "", note=one_line(error))


def one_line(error: Exception | str) -> str:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:200]


class Results:
    """The file of one group."""

    def __init__(self, folder: Path, group: str) -> None:
        self.path, self.group = folder / f"{group}.json", group

    def begin(self, machine: dict[str, Any]) -> None:
        self.content: dict[str, Any] = {"group": self.group, "state": "running", **machine, "rows": []}
        self._write()

    def add(self, row: Row) -> None:
        self.content["rows"].append({key: value for key, value in asdict(row).items() if value or key == "value"})
        self._write()

    def end(self, state: str, seconds: float) -> None:
        """Also for a group whose process has died: its rows stay."""
        self.content = self.read() or {"group": self.group, "rows": []}
        self.content |= {"state": state, "seconds": round(seconds, 1)}
        self._write()

    def read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None

    @property
    def rows(self) -> list[Row]:
        empty: dict[str, Any] = {"name": "", "settings": {}, "value": None, "unit": ""}
        return [Row(**empty | row) for row in (self.read() or {}).get("rows", [])]

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}")
        new.write_text(json.dumps(self.content, indent=1) + "\n")
        new.replace(self.path)

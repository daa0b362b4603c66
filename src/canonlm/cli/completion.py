"""Names for shell completion, read from the package's files: importing the packages that define them takes most of a
second."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
RECIPES, FIGURES = PACKAGE / "launch" / "recipes", PACKAGE / "experiments" / "figures"


def presets() -> list[str]:
    return ["tiny", "small", "paper", *_stems(RECIPES / "playground" / "peers")]


def scales() -> list[str]:
    return ["micro", "small", "paper"]


def tasks() -> list[str]:
    return sorted(_written("tasks", r'^@register\("(\w+)"\)'))


def recipes() -> list[str]:
    return [*_stems(RECIPES), *_stems(RECIPES / "published")]


def experiments() -> list[str]:
    return [*_stems(FIGURES), "all"]


def architectures(incomplete: str) -> list[str]:
    """Completions of the last name in a list with commas; the names' registry imports torch."""
    names = _written("models/mixers", r'^ +"(\S+)": Architecture\(')
    before = incomplete[: incomplete.rfind(",") + 1]
    return [f"{before}{name}{canon}" for name in names for canon in ("", "+canon")]


def _stems(folder: Path) -> list[str]:
    return [path.stem for path in sorted(folder.glob("*.yaml"))]


def _written(folder: str, pattern: str) -> list[str]:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    return re.findall(pattern, "".join(file.read_text("utf-8") for file in files), re.MULTILINE)

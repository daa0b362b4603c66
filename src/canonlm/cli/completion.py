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
    """All tasks: each has a tiny preset."""
    return [name for name in _stems(RECIPES / "playground" / "tiny") if name not in ("default", "text")]


def recipes() -> list[str]:
    return [*_stems(RECIPES), *_stems(RECIPES / "published")]


def experiments() -> list[str]:
    return [*_stems(FIGURES), "all"]


def architectures(incomplete: str) -> list[str]:
    """Completions of the last name in a list with commas; the names' registry imports torch."""
    files = sorted((PACKAGE / "models" / "mixers").glob("*.py"))
    names = re.findall(r'^ +"(\S+)": Architecture\(', "".join(file.read_text("utf-8") for file in files), re.MULTILINE)
    before = incomplete[: incomplete.rfind(",") + 1]
    return [f"{before}{name}{canon}" for name in names for canon in ("", "+canon")]


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))

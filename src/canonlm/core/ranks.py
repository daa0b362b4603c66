"""The place of this process among those of a run, as `torchrun` and other launchers describe it in the environment."""

import os


def ranks() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this machine). ValueError for variables that describe no such place."""
    size = _number("WORLD_SIZE", 1, 1, 2**31)
    return _number("RANK", 0, 0, size), size, _number("LOCAL_RANK", 0, 0, size)


def prints() -> bool:
    """Whether this process prints. All fail alike, and one says why; every one does if it cannot tell which it is."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0


def _number(name: str, default: int, low: int, end: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isdecimal() and low <= int(text) < end):
        below = f" and < {end}, the number of processes" if name.endswith("RANK") else ""
        from canonlm.core.errors import expected  # imports pydantic, which `--version` does not need

        raise expected(name, f"an integer >= {low}{below}", text)
    return int(text)

"""This user's folders. In a container a user may have no home, one that cannot be written, or no entry in passwd."""

import os
import stat
import tempfile
from pathlib import Path


def home() -> Path | None:
    """The user's home folder; None without one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ replaced by the home folder. ValueError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path}: expected a path without ~: the home folder is not known") from None


def cache() -> Path | None:
    """A folder for files that can be made again: `canonlm` in XDG_CACHE_HOME or ~/.cache; if that cannot be written, a
    private temporary folder; None if that cannot be written either."""
    place = os.environ.get("XDG_CACHE_HOME") or (home() and f"{home()}/.cache")
    if place and usable(folder := Path(place) / "canonlm"):
        return folder
    try:
        folder = Path(tempfile.gettempdir()) / f"canonlm-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    # Anybody may make a folder of this name in /tmp, and what is cached runs.
    is_private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if is_private and usable(folder) else None


def usable(folder: Path) -> bool:
    """Make the folder if it is missing; whether this user can write into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)

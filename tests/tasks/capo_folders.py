"""Folders with pools of a user's own."""

from canonlm.tasks.capo.pools import FILES


def write_pools(folder, entries="Only\n", **own):
    """All files of pools with these entries, except those in `own`: their content by name."""
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / f"{name}.txt").write_text(own.get(name, entries), encoding="utf-8")
    return folder

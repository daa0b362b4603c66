"""Mistakes of a user, for the tests of every command."""

import sys
from pathlib import Path

import pytest

from canonlm.cli import main

sys.path.append(str(Path(__file__).parents[1] / "report"))  # folders.py


def contents():
    """Everything below the current folder, with the bytes of files and the times of their last changes."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None for path in Path().rglob("*")
    }


@pytest.fixture
def assert_refused(capsys):
    """`assert_refused(arguments, start)`: exit code 2, one line that begins so on standard error, and nothing else; the
    current folder is as before."""

    def check(arguments, start):
        assert not Path("pyproject.toml").exists(), "other tests write into the clone: monkeypatch.chdir(tmp_path)"
        capsys.readouterr()
        before = contents()
        assert main([*map(str, arguments)]) == 2
        output = capsys.readouterr()
        assert output.err.startswith(f"canonlm: {start}")
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert contents() == before

    return check

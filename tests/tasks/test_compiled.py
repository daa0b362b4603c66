"""The compiled samplers on disk are those of the current sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import canonlm

LOOPS = """
from canonlm import tasks
for name in tasks.names():
    if name != "capo":
        task = tasks.get(name)
        task.windows("train", 0, 0, 1, seq_len=50)
        print(name, sum(task.sampler(False)[0].stats.cache_misses.values()))
"""

DRAW = """
import sys
from canonlm import tasks
print(tasks.__file__)
print(tasks.get("copying", N=5).windows("train", 0, 0, 4, seq_len=24).doc_ids.sum())
"""


def test_another_process_compiles_nothing():
    def misses():
        done = subprocess.run([sys.executable, "-c", LOOPS], check=True, capture_output=True, text=True)
        return sum(int(line.split()[1]) for line in done.stdout.splitlines())

    assert misses() == 0 or misses() == 0  # the first process may have to


@pytest.mark.slow
def test_an_edit_in_an_imported_file_is_seen(tmp_path):
    source = tmp_path / "canonlm"
    shutil.copytree(Path(canonlm.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))

    def draw():
        command = [sys.executable, "-c", DRAW]
        env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        file, total = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
        assert Path(file).is_relative_to(tmp_path)
        return int(total)

    before = draw()
    assert draw() == before
    packing = source / "tasks" / "packing.py"  # `place` is compiled into copying.py's sampler
    code = packing.read_text()
    assert "row_docs[at + i] = doc\n" in code
    packing.write_text(code.replace("row_docs[at + i] = doc\n", "row_docs[at + i] = doc + 1\n"))
    assert draw() == before + 4 * 24

"""Users without a home folder, with one that cannot be written, and with a package that they cannot write."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import canonlm
from canonlm.cli import main
from canonlm.core import numba_cache, user_folders
from canonlm.launch.recipes import recipes
from canonlm.ops import registry, ssd
from canonlm.ops.registry import Form
from canonlm.tasks.random import mix
from canonlm.train.load_config import is_yours, your_folder


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """A user without a home, with this temporary folder."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"canonlm-cache-{os.getuid()}"


def test_caches_of_a_user_without_a_home_are_private(nobody, monkeypatch):
    assert user_folders.cache() == nobody
    assert stat.S_IMODE(nobody.stat().st_mode) == 0o700
    nobody.chmod(0o777)  # somebody else may have put files there
    assert user_folders.cache() is None
    nobody.rmdir()
    (target := nobody.with_name("elsewhere")).mkdir(mode=0o700)
    nobody.symlink_to(target)
    assert user_folders.cache() is None
    nobody.unlink()
    nobody.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    nobody.rename(nobody.with_name("canonlm-cache-12345"))
    assert user_folders.cache() is None  # it is another user's
    monkeypatch.setenv("XDG_CACHE_HOME", str(nobody.parent / "own"))
    assert user_folders.cache() == nobody.parent / "own" / "canonlm"


def test_recipes_of_a_user_without_a_home(nobody, monkeypatch, capsys):
    monkeypatch.chdir(nobody.parent)
    (folder := Path("~/.config/canonlm/recipes")).mkdir(parents=True)  # not the user's: anybody may have made it
    (folder / "q.yaml").write_text("steps: 1")
    assert not is_yours(folder / "q.yaml")
    assert not your_folder().exists()
    assert "debug" in recipes()
    assert "q" not in recipes()
    assert main(["recipes", "show", "debug"]) == 0
    assert "steps" in capsys.readouterr().out


@pytest.mark.parametrize("writable", ["package", "cache", "nothing", "own setting"])
def test_compiled_code_is_cached_where_it_can_be(writable, nobody, monkeypatch):
    own = nobody.parent / "own"
    package = Path(canonlm.__file__).parent / "tasks" / "__pycache__"
    allowed = {"package": package, "cache": nobody, "own setting": own}.get(writable)
    make = user_folders.usable
    monkeypatch.setattr(
        user_folders, "usable", lambda path: allowed is not None and path.is_relative_to(allowed) and make(path)
    )
    monkeypatch.setattr(numba_cache.config, "CACHE_DIR", str(own))
    numba_cache._folder.cache_clear()
    try:
        compiled = numba_cache.njit(cache=True)(mix.py_func)
    finally:
        numba_cache._folder.cache_clear()
    assert compiled(5) == mix(5)
    place = compiled._cache.cache_path
    assert place is None if allowed is None else Path(place).is_relative_to(allowed)
    assert str(own) == numba_cache.config.CACHE_DIR


def test_a_kernel_that_cannot_be_tried_is_not_called_wrong(nobody, monkeypatch, capsys):
    def full(**inputs):
        raise OSError(28, "No space left on device", "/cache/kernel.so")

    kernel = ssd.KERNEL.__class__(**{**vars(ssd.KERNEL), "name": "a kernel", "fast": full})
    monkeypatch.setattr(registry, "forms", lambda device: [Form(kernel, "Mamba2", (torch.float32,))])
    for _ in range(2):  # and that is not recorded
        assert main(["doctor", "--json", str(nobody.parent / "doctor.json")]) == 1
        out = capsys.readouterr().out
        assert "could not be tried on this machine: a kernel (float32)" in out
        assert "wrong on this machine" not in out
        [row] = json.loads((nobody.parent / "doctor.json").read_text())["kernels"]
        assert "No space left on device" in row["detail"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become somebody else")
def test_a_user_without_passwd_entry_and_with_a_package_of_roots():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o711)
        train_as_nobody(Path(folder))


def train_as_nobody(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(Path(canonlm.__file__).parent, package / "canonlm", ignore=shutil.ignore_patterns("__pycache__"))
    (work := tmp_path / "work").mkdir(mode=0o777)
    work.chmod(0o777)
    # It may read root's interpreter, and write nothing but its own.
    become = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
    become += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package), "TMPDIR": str(work), "OMP_NUM_THREADS": "1"}
    if Version(torch.__version__) < Version("2.13"):
        environment["USER"] = "somebody"  # torch asks for the user's name when it is imported
    training = ["train", "debug", "train.steps=1", "train.batch_size=2", "--out", "run"]
    for home, arguments in (({}, training), ({"HOME": "/proc"}, ["recipes", "list"])):
        done = subprocess.run(
            [*become, sys.executable, "-m", "canonlm", *arguments],
            cwd=work, env=environment | home, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (work / "run" / "result.json").is_file()
    assert not (work / "~").exists()

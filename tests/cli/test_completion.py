"""TAB: the words that a shell gets, by the protocol of the script that `--install-completion` writes."""

import os
import subprocess
import sys

import pytest

from canonlm import tasks
from canonlm.cli import completion
from canonlm.experiments import schema
from canonlm.launch import recipes
from canonlm.models.names import bases


def completed(line):
    """The completions of a line in bash, and the libraries that were imported to find them."""
    place = len(line.split(" ")) - 1
    code = (
        "import sys; from canonlm.cli import main\n"
        "sys.argv[0] = 'canonlm'\n"
        "try: main([])\n"
        "finally: print(*{'torch', 'numba'} & {*sys.modules}, file=sys.stderr)"
    )
    environment = os.environ | {"_CANONLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(place)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return result.stdout.split(), result.stderr.strip()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("canonlm pl", ["play", "plan"]),
        ("canonlm play de", ["depo"]),
        ("canonlm play depo --preset ", ["tiny", "small", "paper"]),
        ("canonlm play depo --arch llama,gla5", ["llama,gla5", "llama,gla5+canon"]),
        ("canonlm train deb", ["debug"]),
        ("canonlm replicate fig1", ["fig10", "fig12", "fig13", "fig14"]),
    ],
)
def test_completions_of_a_line(line, words):
    assert completed(line) == (words, "")


def test_names_are_those_of_the_registries():
    assert completion.tasks() == sorted(tasks.names())
    assert completion.presets() == recipes.presets()
    assert completion.recipes() == [*recipes.recipes()]
    assert completion.experiments() == [*sorted(schema.names()), "all"]
    assert [*completion.ARCHITECTURES] == sorted(bases(), key=completion.ARCHITECTURES.index)


def test_the_version_imports_nothing():
    code = (
        "import sys; from canonlm.cli import main; main(['--version']); print({'torch', 'pydantic'} & {*sys.modules})"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    first, second = output.splitlines()
    assert first.startswith("canonlm 0.1.0 (torch 2.")
    assert "transformers 5." in first
    assert second == "set()"

"""TAB: the words that a shell gets, by the protocol of the script that `--install-completion` writes."""

import pytest

from canonlm import tasks
from canonlm.cli import app, completion, main
from canonlm.experiments import schema
from canonlm.launch import recipes
from canonlm.models.names import bases


@pytest.fixture
def completed(monkeypatch, capsys):
    """`completed(line)`: the completions of a line in bash. (They import no torch: tests/test_import.py.)"""

    def complete(line):
        place = len(line.split(" ")) - 1
        variables = {"_CANONLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(place)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            app([], prog_name="canonlm")
        return capsys.readouterr().out.split()

    return complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("canonlm pl", ["play", "plan"]),
        ("canonlm play de", ["depo"]),
        ("canonlm play depo --preset sm", ["small"]),
        ("canonlm play depo --arch llama,gla5", ["llama,gla5", "llama,gla5+canon"]),
        ("canonlm train deb", ["debug"]),
        ("canonlm replicate fig1", ["fig10", "fig12", "fig13", "fig14"]),
    ],
)
def test_completions_of_a_line(completed, line, words):
    assert completed(line) == words


def test_names_are_those_of_the_registries():
    assert completion.tasks() == sorted(tasks.names())
    assert completion.presets() == [*recipes.presets(), *recipes.peers_presets()]
    assert completion.recipes() == [*recipes.recipes()]
    assert completion.experiments() == [*sorted(schema.names()), "all"]
    assert sorted(completion.architectures("")) == sorted(
        f"{name}{canon}" for name in bases() for canon in ("", "+canon")
    )


def test_version(capsys):
    assert main(["--version"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("canonlm 0.1.0 (torch 2.")
    assert "transformers 5." in output

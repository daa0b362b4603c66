"""`canonlm recipes`: all are listed, printed so that they load again, and compared key by key."""

from canonlm.cli import main
from canonlm.launch.recipes import find, recipes
from canonlm.train.load_config import load


def test_list(capsys):
    assert main(["recipes", "list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "architecture", "parameters", "tokens", "context", "batch", "lr"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert set(cells) == set(recipes())
    assert cells["LlamaCanon-1B-Nemo-2T-lr0.005"] == [
        *("llama+canon+rope=0.25", "1.37B", "2.01T", "4096", "2048", "0.005")
    ]
    assert cells["GDN2conv-8B-Nemo-1T-lr0.003"] == ["gdn2", "8.01B", "1.01T", "4096", "512", "0.003"]
    assert cells["debug"][1:4] == ["by", "its", "data"]


def test_show_is_a_recipe(capsys, tmp_path):
    assert main(["recipes", "show", "Mamba2Canon-8B-Nemo-1T-lr0.003", "train.steps=7"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "mine.yaml") == load(find("Mamba2Canon-8B-Nemo-1T-lr0.003"), ["train.steps=7"])


def test_diff_has_only_the_changed_keys(capsys):
    assert main(["recipes", "diff", "Llama-1B-Nemo-1T-lr0.002", "LlamaCanon-1B-Nemo-1T-lr0.003"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["arch", "llama", "->", "llama+canon+rope=0.25"],
        ["train.optim.lr", "0.002", "->", "0.003"],
        ["train.optim.weight_decay", "0.02", "->", "0.0133"],
    ]


def test_diff_with_keys_that_only_one_recipe_sets(capsys):
    main(["recipes", "diff", "GLA5Canon-3B-Nemo-1T-lr0.005", "GLA5Canon-3B-Nemo-1T-lr0.003"])
    assert "model.fields.zeyuan_layernorm  True -> (not set)" in capsys.readouterr().out


def test_diff_of_a_recipe_and_itself(capsys):
    assert main(["recipes", "diff", "debug", str(find("debug"))]) == 0
    assert capsys.readouterr().out == "no difference\n"

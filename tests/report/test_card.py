"""Model cards: the numbers of the run in the Hub's format, whatever the names are."""

import pytest
from folders import evaluation, write_run
from huggingface_hub import ModelCardData, metadata_load

from canonlm.report.card import of_run
from canonlm.runs.load import load_run

SLICES = {("k", 1): (60, 64), ("k", 2): (1, 64)}


@pytest.mark.parametrize("arch", ["llama", "a`|`b\n# c\n~~~~\n---"])
def test_scores_and_settings(tmp_path, arch):
    evals = [evaluation(5, dict.fromkeys(SLICES, (0, 64))), evaluation(10, SLICES, measures={"kl": 0.25})]
    config = {"on_checkpoint": "send --token secret", "note": "~~~~\n# d"}
    run = load_run(write_run(tmp_path / "run", arch=arch, evals=evals, config=config))
    text = of_run(run, 10, "mine", parameters=1_000_000, tokenizer=False, code=True)
    (tmp_path / "README.md").write_text(text)
    data = ModelCardData(**metadata_load(tmp_path / "README.md"))
    scores = [(each.metric_type, each.metric_value) for each in data.eval_results]
    assert scores == [("accuracy", 60 / 64), ("accuracy", 1 / 64), ("kl", 0.25)]
    [row] = [line for line in text.splitlines() if line.startswith("| `1 hop` |")]
    low, high = (float(end.strip("% ")) for end in row.split("|")[3].split("–"))
    assert low < 93.75 < high < 100
    assert "| tokens | `163,840` |" in text  # 10 steps of 32 windows of 512
    assert "secret" not in text
    assert text.count("\n~~~~\n") == 1
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# `mine`"]
    assert "The model was not evaluated after step 7." in of_run(
        run, 7, "mine", parameters=1, tokenizer=False, code=False
    )

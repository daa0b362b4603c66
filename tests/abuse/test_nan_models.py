"""Models whose logits are not finite: every command reports it in one line."""

import json
from contextlib import redirect_stderr
from io import StringIO
from string import ascii_uppercase

import pytest
import torch
import yaml
from abuse import bases

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import main
from canonlm.models.hf import library_model
from canonlm.models.interface import Sizes
from canonlm.runs.answers import read_answers
from canonlm.suites.multihop import MultiHop, MultiHopSettings
from canonlm.tasks import get
from canonlm.tasks.capo import Capo

BYTES = ("--tokenizer", "bytes", "--batch-size", "2")
TASKS = {
    "windows": {"name": "parity", "N": 8},
    "generate": {"name": "brevo", "N": 6},
    "sentences": {"name": "lano", "grammar": "cfg3f"},
    "facts": {"name": "capo", "N": 20},
}


def save(folder, vocab=258, broken=slice(None), **changed):
    torch.manual_seed(0)
    config = CanonLMConfig(
        vocab_size=vocab,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
        **changed,
    )
    model = CanonLMForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = torch.nan
    with redirect_stderr(StringIO()):  # transformers shows a progress bar
        model.save_pretrained(folder)
    return folder


def save_host(model_type, folder, broken=slice(None)):
    """The same for a model of transformers; `rwkv` reads its padding."""
    module = library_model(f"hf:{model_type}", Sizes(2, 16, 2, 258, 2048)).module
    with torch.no_grad():
        module.get_input_embeddings().weight[broken] = torch.nan
    with redirect_stderr(StringIO()):
        module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("nan") / "model")


def evaluate(folder, out, *arguments):
    return main(["eval", str(folder), "--out", str(out), *map(str, arguments)])


def not_finite(out):
    (entry,) = json.loads((out / "results.json").read_text())["results"]
    (score,) = [score for score in entry["scores"] if score["measure"] == "not_finite"]
    return entry, (score["value"], score["n"])


def error_line(capsys):
    """The one line on standard error."""
    written = capsys.readouterr().err
    assert written.count("\n") == 1, written
    assert written.startswith("canonlm: "), written
    return written.rstrip("\n")


@pytest.mark.parametrize(
    "suite", [("multihop", "people=2", "n=3"), ("babilong", "task=qa1", "n=3")], ids=lambda suite: suite[0]
)
def test_questions_in_words(model, tmp_path, capsys, suite):
    command = (model, tmp_path, "--suite", *suite, *BYTES)
    assert evaluate(*command) == 1
    assert error_line(capsys).endswith(": the model's logits are not finite (NaN) in 3 of 3 questions")
    entry, counts = not_finite(tmp_path)
    assert counts == (3, 3)
    assert [row["finite"] for row in read_answers(tmp_path, entry)] == [False] * 3
    assert evaluate(*command) == 1  # as before
    error_line(capsys)


@pytest.mark.parametrize("host", ["llama", "rwkv"])
def test_questions_to_models_of_transformers(tmp_path, capsys, host):
    """Generation compares their logits with those of training before it starts: NaN is equal to NaN."""
    folder = save_host(host, tmp_path / "model")
    assert evaluate(folder, tmp_path / "out", "--suite", "multihop", "people=2", "n=3", *BYTES) == 1
    assert error_line(capsys).endswith(": the model's logits are not finite (NaN) in 3 of 3 questions")
    entry, counts = not_finite(tmp_path / "out")
    assert counts == (3, 3)
    assert entry["scores"][0]["value"] == 0


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", TASKS)
def test_the_playground(tmp_path, capsys, kind):
    task = get(**TASKS[kind])
    folder = save(tmp_path / "model", len(task.vocab), max_position_embeddings=2048)
    settings = [f"task.{key}={value}" for key, value in TASKS[kind].items()]
    assert evaluate(folder, tmp_path, "--suite", "playground", *settings, "n=4", "--batch-size", "2") == 1
    assert "the model's logits are not finite (NaN) in " in error_line(capsys)
    entry, (bad, total) = not_finite(tmp_path)
    assert bad == total == len(read_answers(tmp_path, entry))
    assert main(["report", str(tmp_path), "--table"]) == 0
    assert isinstance(task, Capo) or total >= 4


def test_some_questions_are_a_warning(tmp_path, capsys):
    partly = save(tmp_path / "model", broken=[ord("Q")])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("All is well\nQuestions\nand so on\n")
    generate = ("generate", str(partly), "--prompts", str(prompts), *BYTES, "--max-tokens", "4")
    assert main([*generate, "--out", str(tmp_path / "answers.jsonl")]) == 0
    assert error_line(capsys) == "canonlm: the model's logits are not finite (NaN) in 1 of 3 prompts"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("host", [None, "llama", "rwkv"])
def test_some_questions_of_a_suite_are_a_warning(tmp_path, capsys, host):
    questions = MultiHop(MultiHopSettings(people=2, n=6), len)
    prompts = [questions[index].prompt for index in range(6)]
    letter = next(letter for letter in ascii_uppercase if 0 < sum(letter in prompt for prompt in prompts) < 6)
    bad = sum(letter in prompt for prompt in prompts)
    folder, broken = tmp_path / "model", [ord(letter)]
    partly = save_host(host, folder, broken) if host else save(folder, broken=broken)
    assert evaluate(partly, tmp_path / "out", "--suite", "multihop", "people=2", "n=6", *BYTES) == 0
    assert error_line(capsys).endswith(f"1hop-0k: the model's logits are not finite (NaN) in {bad} of 6 questions")
    entry, counts = not_finite(tmp_path / "out")
    assert counts == (bad, 6)
    finite = [row.get("finite", True) for row in read_answers(tmp_path / "out", entry)]
    assert finite == [letter not in prompt for prompt in prompts]


def test_generation(model, tmp_path, capsys):
    for sampling in ([], ["--temperature", "1", "--top-k", "4", "--top-p", "0.9"]):
        assert main(["generate", str(model), "Hello", "--tokenizer", "bytes", *sampling]) == 1
        assert error_line(capsys) == "canonlm: the model's logits are not finite (NaN): it cannot write"
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    out = tmp_path / "answers.jsonl"
    assert main(["generate", str(model), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out), *BYTES]) == 1
    assert (
        error_line(capsys) == "canonlm: the model's logits are not finite (NaN) in 2 of 2 prompts: nothing is written"
    )
    assert not out.exists()


@pytest.mark.slow
def test_the_harness(model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "data.json"
    data.write_text("".join(json.dumps({"text": f"{n} and {n}", "answer": 0}) + "\n" for n in range(3)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "num_fewshot": 0,
    }
    tasks = {
        "choices": {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": "answer"},
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
            ],
        },
        "writes": {
            "output_type": "generate_until",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
        },
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, config in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"nan_{name}", **common, **config}))
    names = ",".join(f"nan_{name}" for name in tasks)
    assert (
        evaluate(
            model, tmp_path / "out", "--suite", "harness", f"include={folder}", "--tasks", names, "--trust", *BYTES
        )
        == 1
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("canonlm: ")]
    assert [line.partition(": the")[0] for line in lines] == [f"canonlm: nan_{name}" for name in tasks]
    assert all(line.endswith("not finite (NaN) in 3 of 3 questions") for line in lines)


def test_a_probe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bases.grammar(tmp_path)
    from canonlm.train import checkpoint

    load = checkpoint.load_model

    def broken(*given, **more):
        model = load(*given, **more)
        with torch.no_grad():
            model.module.get_input_embeddings().weight[:] = torch.nan
        return model

    monkeypatch.setattr(checkpoint, "load_model", broken)
    capsys.readouterr()
    assert main(["probe", "run", "--fit", "3", "--test", "2"]) == 1
    assert "the model's hidden states are not finite (NaN) at " in error_line(capsys)

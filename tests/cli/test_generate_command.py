"""`canonlm generate`: generated text on the terminal or in a file; a one-line error if that is impossible."""

import json

import pytest
import torch
from saved_runs import OF_COPYING, save_run

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import main
from canonlm.data.tokenizers import load
from canonlm.suites.generation import Writer
from canonlm.suites.load_model import as_in_training, open_model

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def saved(folder, **fields):
    """Weights with which all prompts continue differently, with bytes below 128 only, so that all output is text."""
    config = CanonLMConfig(**SIZES, vocab_size=258, bos_token_id=256, eos_token_id=257, initializer_range=0.6, **fields)
    model = CanonLMForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[: ord(" ")] = model.lm_head.weight[127:] = 0
    model.save_pretrained(folder)
    as_in_training(*load("bytes")).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("generate")
    saved(workdir / "words", mixers=["gla"], canon_set="AbCD")
    saved(workdir / "short", max_position_embeddings=16)
    CanonLMForCausalLM(CanonLMConfig(**SIZES, vocab_size=258)).save_pretrained(workdir / "bare")
    save_run(workdir / "played", OF_COPYING, (1,))
    return workdir


@pytest.fixture
def workdir(models, tmp_path, monkeypatch):
    for name in ("words", "short", "bare", "played"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PANICS = {
    "pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a|aa)+$"}},  # more steps than the library takes
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQAAAAAA"},
    "post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]},
    "decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2**60},
}  # fmt: skip


@pytest.mark.parametrize("part", PANICS)
def test_a_panic_of_the_tokenizers_library_is_one_line(part, workdir, capsys):
    saved(workdir / "model")
    file = workdir / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: PANICS[part]}))
    (workdir / "a.txt").write_text("a" * 60 + "b\n")
    assert main(["generate", "model", "a" * 60 + "b", "--max-tokens", "2", "--device", "cpu"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("canonlm: ")]
    assert len(lines) == 1
    assert "model" in lines[0]
    assert "tokenizer" in lines[0]
    prepared = main(["data", "prepare", "out", "--input", "a.txt", "--tokenizer", str(file), "--workers", "1"])
    assert prepared == (0 if part in ("post_processor", "decoder") else 2)  # which it does not use
    assert "Traceback" not in capsys.readouterr().err
    if part != "pre_tokenizer":
        command = ["eval", "model", "--suite", "multihop", "people=2", "n=2", "--out", "evals", "--device", "cpu"]
        assert main(command) == 2
        output = capsys.readouterr()
        (line,) = [line for line in output.err.splitlines() if line.startswith("canonlm: ")]
        assert "model/tokenizer.json: the tokenizer failed (" in line
        assert "Traceback" not in output.out + output.err
        assert not (workdir / "evals" / "results.json").exists()


def written(model, prompts, most, stop=(), bos=True):
    subject = open_model(model)
    result = dict(Writer(subject.model, subject.tokenizer, bos=bos).write(prompts, most, stop))
    return [result[index] for index in range(len(prompts))]


def output_of(capsys, *arguments):
    assert main(["generate", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_a_prompt_is_continued(workdir, capsys):
    text = written("words", ["Once upon"], 20)[0]
    assert output_of(capsys, "words", "Once upon", "--max-tokens", "20") == f"Once upon{text}\n"
    without = written("words", ["Once upon"], 20, bos=False)[0]
    assert without != text  # the tokenizer adds BOS to texts
    assert output_of(capsys, "words", "Once upon", "--max-tokens", "20", "--no-bos") == f"Once upon{without}\n"
    stop = text[7:9]
    cut = output_of(capsys, "words", "Once upon", "--max-tokens", "20", "--stop", "never there", "--stop", stop)
    assert cut == f"Once upon{text[: text.index(stop)]}\n"


def test_generates_up_to_the_context_length(workdir, capsys):
    text = written("short", ["aaaaaaaaaa"], 5)[0]
    assert len(text) == 5  # with bos: 16 tokens
    assert output_of(capsys, "short", "aaaaaaaaaa") == f"aaaaaaaaaa{text}\n"
    assert len(output_of(capsys, "short", "", "--no-bos")) > 1  # an empty prompt begins with a token all the same


def test_the_text_is_streamed(workdir, monkeypatch):
    bits = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: bits.append(text))
    assert main(["generate", "words", "Once upon", "--max-tokens", "20"]) == 0
    assert bits[0] == "Once upon"
    assert len(bits) > 10


@pytest.mark.slow
def test_draws_are_a_function_of_the_seed(workdir, capsys):
    draw = ("words", "Once", "--max-tokens", "20", "--temperature", "0.9", "--top-k", "30", "--top-p", "0.9")
    texts = []
    for seed in ("1", "1", "2"):
        torch.manual_seed(len(texts))
        texts.append(output_of(capsys, *draw, "--seed", seed))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert output_of(capsys, "words", "Once", "--max-tokens", "20") not in texts


@pytest.mark.parametrize("kind", ["text", "windows", "jsonl", "JSONL"])
def test_a_file_of_prompts(workdir, capsys, kind):
    prompts = ["Once upon a time", "é", "a longer one, that goes on and on", "x"]
    if kind.lower() != "jsonl":
        end = "\r\n" if kind == "windows" else "\n"
        (workdir / "file.txt").write_bytes((end.join([*prompts[:2], "", *prompts[2:]]) + end).encode())
    else:
        rows = [{"id": index, "prompt": prompt} for index, prompt in enumerate(prompts)]
        (workdir / f"file.{kind}").write_text("\n".join(map(json.dumps, rows)))
    file = f"file.{kind}" if kind.lower() == "jsonl" else "file.txt"
    arguments = ("words", "--prompts", file, "--out", "made/answers.jsonl", "--max-tokens", "9", "--stop", "e")
    assert output_of(capsys, *arguments) == "4 prompts answered: made/answers.jsonl\n"
    answers = [json.loads(line) for line in (workdir / "made" / "answers.jsonl").read_text("utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert [answer["text"] for answer in answers] == written("words", prompts, 9, ["e"])
    assert [answer.get("id") for answer in answers] == ([0, 1, 2, 3] if kind.lower() == "jsonl" else [None] * 4)
    assert [file.name for file in (workdir / "made").iterdir()] == ["answers.jsonl"]


def test_draws_for_a_file_do_not_depend_on_its_batches(workdir, capsys):
    (workdir / "file.txt").write_text("one\ntwo and three\nfour\n")
    collected = []
    for size in ("1", "3"):
        arguments = ("words", "--prompts", "file.txt", "--out", size, "--temperature", "1", "--max-tokens", "9")
        output_of(capsys, *arguments, "--batch-size", size)
        collected.append((workdir / size).read_text())
    assert collected[0] == collected[1]


def test_an_interrupted_file_is_continued(workdir, capsys, monkeypatch):
    """Draws of prompts that are left do not depend on which ones that are. Other settings continue nothing."""
    (workdir / "file.txt").write_text("one\ntwo and three\nfour\nfive or six\n")
    arguments = ["words", "--prompts", "file.txt", "--temperature", "1", "--max-tokens", "9", "--batch-size", "1"]
    output_of(capsys, *arguments, "--out", "whole")
    batch, asked, left = Writer._batch, [], 2

    def interrupted(self, indices, *args, **options):
        if len(asked) == left:
            raise KeyboardInterrupt
        asked.extend(indices)
        return batch(self, indices, *args, **options)

    monkeypatch.setattr(Writer, "_batch", interrupted)
    assert main(["generate", *arguments, "--device", "cpu", "--out", "out"]) == 130
    (part,) = workdir.glob("out.*.part")
    assert f"interrupted; the answers so far are in {part.name}. The same command continues" in capsys.readouterr().err
    with part.open("a") as file:
        file.write('{"index": 0, "sl')  # half a line of a process that was killed
    left = None
    output_of(capsys, *arguments, "--out", "out", "--seed", "1")
    assert sorted(asked[2:]) == [0, 1, 2, 3]
    (workdir / "out").unlink()
    output_of(capsys, *arguments, "--out", "out")
    assert sorted(asked[:2] + asked[6:]) == [0, 1, 2, 3]
    assert (workdir / "out").read_text() == (workdir / "whole").read_text()
    assert not part.exists()


def test_a_playground_run_uses_the_vocabulary_of_its_task(workdir, capsys):
    text = output_of(capsys, "played", "bos x3 x1 x4 ans", "--max-tokens", "5")
    assert text.startswith("bos x3 x1 x4 ans ")
    words = text.split()
    assert 5 < len(words) <= 10
    assert set(words) <= {"bos", "ans", *(f"x{i}" for i in range(1, 41))}


def test_another_tokenizer(workdir, capsys):
    assert output_of(capsys, "bare", "ab", "--tokenizer", "bytes", "--max-tokens", "3").startswith("ab")


MISTAKES = [
    (["words"], "PROMPT is missing: a text (or --prompts with a file of them)"),
    (["words", "a", "--prompts", "file"], "PROMPT cannot be used with --prompts"),
    (["words", "a", "--out", "b"], "--out only works with --prompts"),
    (["words", "--prompts", "file"], "--prompts needs --out"),
    (["words", "--prompts", "file", "--out", "file"], '--out: expected a file that does not exist yet, got "file"'),
    (["words", "--prompts", "file", "--out", "file/x"], "--out: expected a file that can be written ("),
    (["words", "--prompts", "none", "--out", "b"], "--prompts: expected a text file that can be read (No such file"),
    (["words", "--prompts", "empty", "--out", "b"], "--prompts: expected a file with at least one prompt, got"),
    (["words", "--prompts", "bad.jsonl", "--out", "b"], '--prompts: expected {"prompt": "…"} in every line, got'),
    (
        ["words", "--prompts", "text.jsonl", "--out", "b"],
        '--prompts: expected lines without the key "text", which is for',
    ),
    (["words", "--prompts", "half.jsonl", "--out", "b"], "--prompts: expected text without half of a surrogate pair"),
    (["words", "--prompts", "id.jsonl", "--out", "b"], "--prompts: expected text without half of a surrogate pair"),
    (["words", "a\udcff"], "PROMPT: expected text without half of a surrogate pair"),
    (["words", "a", "--stop", "\udcff"], "--stop: expected text without half of a surrogate pair"),
    (["words", "a", "--top-k", "5"], "--top-k only works with a --temperature above 0"),
    (["words", "a", "--temperature", "nan"], "--temperature: expected a number >="),
    (["none", "a"], 'MODEL: "none" is neither a folder nor a model on the Hub that can be reached'),
    (["bare", "a"], "--tokenizer is missing: the model has none"),
    (["short", "a" * 16], "the prompt: 17 tokens, and 1 to write, are more than the model's context of 16"),
    (["short", "a", "--max-tokens", "20"], "the prompt: 2 tokens, and 20 to write, are more than the model's context"),
    (["short", "--prompts", "two", "--out", "b"], "prompt 0: 2 tokens, and 128 to write, are more than the model's"),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES, ids=[" ".join(result[0])[:40] for result in MISTAKES])
def test_mistakes_are_reported_in_one_line(workdir, monkeypatch, assert_refused, arguments, start):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (workdir / "file").write_text("one\n")
    (workdir / "two").write_text("b\n\naaaaaaaaaaaaaa\n")
    (workdir / "empty").write_text("\n\n")
    (workdir / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (workdir / "text.jsonl").write_text('{"prompt": "a", "text": "b"}\n')
    (workdir / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (workdir / "id.jsonl").write_text('{"prompt": "a", "id": "\\ud800"}\n')
    assert_refused(["generate", *arguments], start)

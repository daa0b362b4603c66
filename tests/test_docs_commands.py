"""The commands in `sh` blocks of README and docs run: those of a page in their order, in a folder that has what they
need. Sizes are smaller, small models and data replace those of the Hub, and experiments and `play` train nothing."""

import json
import re
import shlex
import shutil
from pathlib import Path

import datasets
import pytest
import transformers
from test_docs import FENCE, PAGES, ROOT, files_of, long_commands
from typer.main import get_command

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.cli import app, main
from canonlm.data.tokenizers import bytes_tokenizer
from canonlm.models.published import save_published

SIZES = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONTEXT = 8192
STEPS = "train.steps=2 train.batch_size=2 train.eval_size=2"
TRAIN = f"{STEPS} model.hidden_size=16 model.num_hidden_layers=1 model.num_attention_heads=2"
SMALLER = {
    "train (?!.*model.weights)": TRAIN,
    "train .*model.weights": STEPS,
    "train Llama-1B": "model.vocab_size=258 train.compile=false",  # the vocabulary of the tokenizer here
    "train .* --out runs/hops": "data.seq_len=256",  # a prompt has more bytes than tokens
    "generate": "--max-tokens 4",
    "eval .* (multihop|babilong|playground)": "n=2",
    "data multihop": "--n 50",
    "profile (?!.*--only)": "--tasks copying",
    "profile .*--only": "--only copying",
    "play capo task.rewrites": "task.N=1",
}
"""Added to the commands that begin like this."""

ONLY_PARSED = re.compile("--slurm|--executor slurm|harness --published|lm-eval")
"""Commands that need a cluster, which `make test-slurm` has, or more of the Hub's datasets."""

ROWS = {
    "baber/piqa": {"goal": "To dry a coat,", "sol1": "hang it up.", "sol2": "put it in a pond.", "label": 0},
    "allenai/ai2_arc": {
        "id": "1",
        "question": "What falls in winter?",
        "choices": {"text": ["snow", "bread"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "RMT-team/babilong-1k-samples": {
        "input": "Mary went to the garden.",
        "question": "Where is Mary?",
        "target": "garden",
    },
}
"""A row of each dataset."""


def load_dataset(path, name=None, split=None, **_):
    rows = datasets.Dataset.from_list([ROWS[path]] * 2)
    return rows if split else datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))


def run(command: str, *more: str) -> None:
    words, added = shlex.split(command, comments=True), shlex.split(" ".join(more))
    for option in [word for word in added if word.startswith("--") and word in words]:
        del words[(at := words.index(option)) : at + 2]
    words += added
    for at, word in enumerate(words):
        if word.endswith("/…"):
            words[at] = str(next(path.parent for path in Path(word[:-1]).glob("*/checkpoints")))
    # `check` finds wrong answers in some models of transformers: 1
    assert main(words) in ([0, 1] if command.startswith("check hf:") else [0]), command


def parse(command: str) -> None:
    parser, words = get_command(app), shlex.split(command, comments=True)
    while hasattr(parser, "commands"):
        parser, words = parser.commands[words[0]], words[1:]
    parser.make_context("canonlm", words)  # it must not raise


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Models, text, runs and evaluations under the names that the pages use."""
    folder = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("texts").mkdir()
        for number in range(20):  # some of which are held out
            Path(f"texts/{number}.txt").write_text(f"A cat sat on {number} mats.\n" * 400)
        Path("prompts.txt").write_text("def main(\n")
        Path("my.jsonl").write_text(2 * '{"text": "A cat sat.", "content": "On a mat."}\n')
        capo = tasks.get("capo", N=1)
        texts = [capo.vocab.show(capo.sample("train", 0, e)).removeprefix("<bos> ") for e in range(3)]
        Path("biographies.jsonl").write_text("".join(json.dumps({"person": 0, "text": text}) + "\n" for text in texts))
        bytes_tokenizer().save("tokenizer.json")
        for name in ("org/model", "meta-llama/Llama-3.2-1B", "gpt2", "MODEL"):
            CanonLMForCausalLM(CanonLMConfig(**SIZES, max_position_embeddings=CONTEXT)).save_pretrained(name)
            bytes_tokenizer().save(f"{name}/tokenizer.json")
        qwen = transformers.Qwen3Config(**SIZES, intermediate_size=32, num_key_value_heads=2, head_dim=8)
        transformers.Qwen3ForCausalLM(qwen).save_pretrained("Qwen/Qwen3-0.6B")
        Path("release/GDN2Canon-tiny").mkdir(parents=True)
        gdn2 = CanonLMConfig(**SIZES, mixers=["gdn"], canon_set="AbCD")
        save_published(CanonLMForCausalLM(gdn2), Path("release/GDN2Canon-tiny"), to="lingua")
        run("train debug --out runs/debug", TRAIN)
        run(f"train debug --out runs/mine data.seq_len={CONTEXT}", TRAIN)
        for name in ("my-run", "yours"):
            shutil.copytree("runs/mine", f"runs/{name}")
        for task, name in {"mqar": "mqar", "copying": "copying-tiny", "depo": "depo-tiny"}.items():
            run(f"play {task} --arch llama+canon --out runs/{name}", TRAIN)
        shutil.copytree("runs/mqar/runs", "runs/many")
        run("eval org/model --suite multihop n=2 --out evals")
        run("data prepare data/stories --input texts/ --tokenizer tokenizer.json --validation 0.1")
        for name in ("csv", "again-csv"):
            shutil.copytree(ROOT / "src/canonlm/experiments/kept", f"runs/{name}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if long_commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, stage, tmp_path, monkeypatch, capsys):
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("canonlm.cli.live.follow_grid", lambda *_: [])
    monkeypatch.setattr("canonlm.experiments.replicate.replicate", lambda *_, **__: {})
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    codes = files_of(page) or [text for _, text in FENCE.findall(page.read_text()) if "\n@task(" in text][:1]
    Path("mine.py").write_text("\n".join(codes or files_of(ROOT / "docs/add-a-mixer.md")))
    if "canonlm train debug " in page.read_text():
        shutil.rmtree("runs/debug")  # it makes its own
    for line in long_commands(page):
        command = line.removeprefix("canonlm ")
        if ONLY_PARSED.search(command):
            parse(command)
            continue
        run(command, *(more for start, more in SMALLER.items() if re.match(start, command)))
        assert capsys.readouterr().out.strip(), line

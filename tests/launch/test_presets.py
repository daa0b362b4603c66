"""Presets load, fit together, and the `paper` ones are the paper's (arXiv 2512.17351, App. A and B)."""

import re
from pathlib import Path

import pytest

from canonlm import tasks
from canonlm.launch.grid import plan
from canonlm.launch.recipes import PEERS, PLAYGROUND, load_preset, peers_presets, presets
from canonlm.models.names import bases
from canonlm.train.build import build_model
from canonlm.train.config import resolve
from canonlm.train.load_config import merge, read_yaml

PAGE = Path(__file__).parents[2] / "docs" / "playground.md"

# (context, batch, learning rates, seeds, weight decay, loss on), for lines of the paper's table with equal values.
COPYING = (1024, 32, (5e-4, 1e-3, 2e-3, 5e-3), 1, 0.03, "answer")
DEPO = (2048, 128, (3e-4, 5e-4, 1e-3, 2e-3), 1, 0.03, "answer")
DEPO1 = {"test_lengths": None, "K": 8, "train_k": None, "M": 10, "name_vocab": 50, "min_name_len": 1, "max_name_len": 2}
DEPO2 = {**DEPO1, "K": 16, "name_vocab": 3, "min_name_len": 5, "max_name_len": 7}  # the text says 4, the release has 3
BREVO1 = (1024, 256, (3e-4, 5e-4, 1e-3, 2e-3), 1, 0.03, "answer")
BREVO2 = (1536, 192, (3e-4, 5e-4, 1e-3, 2e-3), 1, 0.03, "answer")
NODES = {"query": "last", "name_vocab": None, "min_name_len": 1, "max_name_len": 1}  # the text says last quarter
NAMES = {"query": "last", "name_vocab": 4, "min_name_len": 2, "max_name_len": 4}
MANO = (1024, 64, (1e-4, 2e-4, 3e-4, 5e-4), 2, 0.1, "all")
MANO_SPEC = {"ops": "asm", "modulus": 23, "synonyms": True, "test_lengths": None}
LANO = (96, (2e-4, 3e-4, 5e-4, 1e-3), 1, 0.1, "all")
BIOS = {
    "exposures": 100, "variant": "fresh", "texts": 5, "permute": True, "fullname": False, "questions": False,
    "rewrites": None, "people_seed": None, "pools": None, "tokenizer": None, "vocab_size": 3275,
}  # fmt: skip


# Each entry is a line of the paper's table: steps (None: all exposures), the above, settings of the task.
PAPER = {
    "copying": {
        "copying-500": (50_000, COPYING, {"N": 500, "min_items": 500, "max_items": None, "test_lengths": None})
    },
    "depo": {
        f"depo{kind}-{n}{'-k4' if k else ''}": (steps, DEPO, {"N": n, **spec, **k})
        for k in ({}, {"K": 4})
        for kind, n, steps, spec in (
            *((1, 225, 87_500, DEPO1), (1, 300, 100_000, DEPO1), (1, 375, 112_500, DEPO1)),
            *((2, 75, 100_000, DEPO2), (2, 100, 125_000, DEPO2), (2, 125, 150_000, DEPO2)),
        )
    },
    "brevo": {
        "brevo1-70": (100_000, BREVO1, {"N": 70, **NODES}),
        "brevo1-90": (125_000, BREVO1, {"N": 90, **NODES}),
        "brevo1-110": (150_000, BREVO1, {"N": 110, **NODES}),
        "brevo2-30": (200_000, BREVO2, {"N": 30, **NAMES}),
        "brevo2-40": (225_000, BREVO2, {"N": 40, **NAMES}),
        "brevo2-50": (250_000, BREVO2, {"N": 50, **NAMES}),
    },
    "mano": {
        "mano-10": (80_000, MANO, {"L": 10, **MANO_SPEC}),
        "mano-13": (95_000, MANO, {"L": 13, **MANO_SPEC}),
        "mano-16": (110_000, MANO, {"L": 16, **MANO_SPEC}),
    },
    "lano": {
        "cfg3f": (100_000, (512, *LANO), {"grammar": "cfg3f"}),
        "cfg3j": (100_000, (1536, *LANO), {"grammar": "cfg3j"}),
        "cfg3k": (100_000, (1536, *LANO), {"grammar": "cfg3k"}),
    },
    "capo": {
        f"capo-{people}{moe}": (None, (512, batch, lrs, 1, 0.01, "all"), {"N": n, **BIOS})
        for moe in ("", "-moe")
        for people, n, batch, lrs in (
            ("50k", 50_000, 12, (5e-3, 2e-3, 1e-3) if moe else (1e-3, 5e-4)),
            ("100k", 100_000, 24, (5e-3, 2e-3, 1e-3) if moe else (1e-3, 5e-4)),
            ("200k", 200_000, 48, (5e-3, 2e-3, 1e-3) if moe else (1e-3, 5e-4)),
            ("500k", 500_000, 96, (2e-3, 1e-3) if moe else (1e-3, 5e-4)),
            ("1m", 1_000_000, 192, (2e-3, 1e-3) if moe else (1e-3, 5e-4)),
            ("2m", 2_000_000, 384, (1e-3, 5e-4) if moe else (5e-4, 3e-4)),
        )
    },
}
LINES = [(task, difficulty) for task, lines in PAPER.items() for difficulty in lines]


@pytest.fixture
def short_capo(monkeypatch):
    """Counting the windows of up to 200 million biographies takes a while; test_paper_steps_of_capo counts fewer."""
    monkeypatch.setattr(tasks.Capo, "training_windows", lambda self, seed, seq_len: 12_345_678)


@pytest.mark.usefixtures("short_capo")
@pytest.mark.parametrize(("task", "difficulty"), LINES)
def test_paper_presets_equal_the_paper(task, difficulty):
    steps, (context, batch, lrs, seeds, decay, loss_on), spec = PAPER[task][difficulty]
    preset = load_preset(task, "paper", difficulty)
    run = resolve(merge(preset.run, {"arch": "llama"}))
    assert (preset.lrs, preset.seeds) == (lrs, seeds)
    assert run.task == {"name": task, **spec}
    assert (run.data.seq_len, run.data.loss_on, run.data.isolate_documents) == (context, loss_on, False)
    assert run.train.batch_size == batch
    assert run.train.steps == steps or (steps is None and run.train.steps == -(-12_345_678 // batch))
    optim = run.train.optim
    assert (optim.betas, optim.eps, optim.weight_decay) == ((0.9, 0.98), 1e-6, decay)
    schedule = (optim.warmup_steps, optim.schedule, optim.final_lr_ratio)
    assert schedule == ((0, "linear", 0) if task == "lano" else (1000, "cosine", 0.1))
    config = build_model(run, "meta").module.config
    assert config.tie_word_embeddings == (task == "capo")
    mlp = ("moe", 32, 2.0) if difficulty.endswith("moe") else ("gated", None, None)
    assert (config.mlp, config.num_experts, config.expert_capacity) == mlp
    sizes = (run.model.num_hidden_layers, run.model.hidden_size, run.model.num_attention_heads)
    assert task == "copying" or sizes == (8, 512, 8)


def test_paper_steps_of_capo():
    """All exposures, and no more windows: a tenth of the people of the smallest line, 100 times each."""
    preset = load_preset("capo", "paper", "capo-50k")
    run = resolve(merge(preset.run, {"arch": "llama", "task": {"N": 5000}}))
    mean = 77  # tokens of a biography, about
    assert run.train.steps == pytest.approx(5000 * 100 * mean / 512 / 12, rel=0.05)


def test_every_task_and_line_of_the_paper_has_presets():
    assert presets() == ["tiny", "small", "paper"]
    for task, lines in PAPER.items():
        assert list(read_yaml(PLAYGROUND / "paper" / f"{task}.yaml")[0]["difficulties"]) == list(lines)
        assert load_preset(task, "paper").difficulty == next(iter(lines))


def alike(difficulty):
    """Capo's lines differ only in N and batch size, so the smallest two stand for all; of Depo's lines with K = 4, the
    first one does. `test_paper_presets_equal_the_paper` has every line."""
    capo = difficulty.startswith("capo-") and not difficulty.startswith("capo-50k")
    return capo or (difficulty.endswith("-k4") and difficulty != "depo1-225-k4")


EVERY = [
    (task, name, difficulty)
    for task in tasks.names()
    for name in presets()
    for difficulty in (PAPER.get(task, [None]) if name == "paper" else [None])
    if difficulty is None or not alike(difficulty)
]


@pytest.mark.every(8)
@pytest.mark.usefixtures("short_capo")
@pytest.mark.parametrize(("task", "name", "difficulty"), EVERY)
def test_every_preset_plans_and_builds(tmp_path, task, name, difficulty):
    """Each preset is tested with a seventh of the architectures, in turn."""
    preset = load_preset(task, name, difficulty)
    first = EVERY.index((task, name, difficulty)) % 7
    canon = "canon=AC" if (difficulty or "").endswith("moe") else "canon"  # experts have no site D
    archs = [arch for base in list(bases())[first::7] for arch in (base, f"{base}+{canon}")]
    runs = plan(preset, tmp_path / "out", archs=archs)
    assert len(runs) == len(archs) * len(preset.lrs) * preset.seeds
    assert len({run.folder for run in runs}) == len(runs)
    assert not (tmp_path / "out").exists()
    assert {run.config.preset for run in runs} == {name}
    config = runs[-1].config  # the plan has built all models once
    assert build_model(config, "meta").module.config.vocab_size == len(config.built_task.vocab)
    if config.built_task.in_windows:
        row = config.built_task.instances("test", 0, 0, config.data.seq_len)
        assert row, "a test window holds at least one whole instance"


def test_the_settings_of_peers_fit_and_build():
    documented = re.findall(r"^\| `([\w-]+)` \| a GPU \| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert dict(documented) == peers_presets()
    for name, task in peers_presets().items():
        for difficulty in read_yaml(PEERS / f"{name}.yaml")[0]["difficulties"]:
            config = resolve({**load_preset(task, name, difficulty).run, "arch": "gdn2+canon"})
            assert config.data.seq_len >= config.built_task.max_len
            assert build_model(config, "meta").module.config.num_hidden_layers == 2
            if name == "zoology-fig2":  # one sample a row, always with as many pairs
                lengths = {len(config.built_task.sample("train", 0, index).tokens) for index in range(20)}
                assert lengths == {config.data.seq_len} == {16 * int(difficulty.removeprefix("pairs-")) + 2}


def test_mistakes_name_the_choices():
    for arguments, message in (
        (("deppo", "tiny"), 'unknown task "deppo". Did you mean "depo"?'),
        (("depo", "tinny"), 'unknown preset "tinny". Did you mean "tiny"?'),
        (("depo", "paper", "depo1-226"), 'unknown depo difficulty "depo1-226". Did you mean "depo1-225"?'),
        (("depo", "zoology-fig2"), "--preset: expected one of depo; `canonlm play recall` has this one, got"),
        (("depo", "tiny", "depo1-225"), "--difficulty only works with presets of papers: the tiny preset of depo"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            load_preset(*arguments)


def test_presets_name_no_files():
    """A path would work on one machine only."""
    for path in PLAYGROUND.rglob("*.yaml"):
        assert not [word for word in path.read_text().split() if word.startswith(("/", "~", "./"))], path

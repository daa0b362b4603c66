"""The 64 recipes are the release's runs: every setting, every parameter, and the initial loss."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from canonlm.launch.recipes import PUBLISHED, find, recipes
from canonlm.models.decoder import config_of
from canonlm.models.published.checkpoint import parse
from canonlm.models.published.format import check_same
from canonlm.train.build import build_model, sizes_of
from canonlm.train.load_config import load

LINES = Path(__file__).with_name("published.csv").read_text().splitlines()
ROWS = {row["recipe"]: row for row in csv.DictReader(line for line in LINES if not line.startswith("#"))}
FULL_SIZE = json.loads((Path(__file__).parents[1] / "golden" / "full_size.json").read_text())
LINEAR = {"": "attention", "GLA5": "gla", "GDN2": "gdn", "Mamba2": "mamba2"}
VOCABULARY = {"llama2": 32000, "llama3": 128256}

# Of all 64:
CONSTANT = {"seed": 777, "precision": "bf16", "compile": True, "log_every": 10, "keep_checkpoints": 3}
OPTIM = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "decay": "all",
    "schedule": "cosine",
    "final_lr_ratio": 0.01,
    "grad_clip": 1,
}


def test_there_are_64():
    assert len(ROWS) == 64
    assert {path.stem for path in PUBLISHED.glob("*.yaml")} == set(ROWS)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ROWS)
def test_optimisation_data_and_batch(name):
    row, run = ROWS[name], load(find(name))
    train, optim = run.train, run.train.optim
    assert {key: getattr(train, key) for key in CONSTANT} == CONSTANT
    assert {key: getattr(optim, key) for key in OPTIM} == OPTIM
    assert optim.lr == float(row["lr"])
    assert optim.weight_decay == float(row["weight_decay"])
    assert optim.warmup_steps == int(row["warmup"])
    assert train.steps == int(row["steps"])
    assert train.batch_size == int(row["global_batch_seqs"])
    assert run.data.seq_len == int(row["seq_len"])
    assert train.batch_size * run.data.seq_len == int(row["global_batch_tokens"])
    assert train.steps * train.batch_size * run.data.seq_len == int(row["tokens_implied"])
    assert train.checkpoint_every == int(row["ckpt_dump_every"])
    assert train.keep_every == int(row["ckpt_eval_every"])
    [(source, where)] = run.text.sources.items()
    assert source == row["data_source"].replace("=", "_")  # an override, key=value, could not name it otherwise
    assert where.path.endswith(row["tokenizer_path"])
    assert run.model.vocab_size == VOCABULARY[row["tokenizer_path"]]
    assert not run.data.isolate_documents


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ROWS)
def test_model(name):
    row, run = ROWS[name], load(find(name))
    config = config_of(run.arch, sizes_of(run), run.train.seed)
    given = {key: value for key, value in row.items() if value}
    dim = int(row["dim"])
    assert (config.hidden_size, config.num_hidden_layers) == (dim, int(row["n_layers"]))
    assert set(config.mixers) == {LINEAR[row["model_name"]]}
    assert config.canon_set == "".join(sorted(set(row["canon_set"]), key="AbBCD".index))
    assert config.z_loss == ("squared_nll" if row["z_loss"] else None)
    assert config.zeyuan_layernorm == bool(row["zeyuan_layernorm"])
    assert (config.rms_norm_eps, config.init_seed, config.canon_kernel) == (1e-5, 777, 4)
    if row["model_name"]:
        assert config.options(0).num_heads == int(row["n_heads"])
        assert config.intermediate_size == int(given.get("hidden_dim", 2 * dim))
        if row["model_name"] == "Mamba2":
            assert config.options(0).state_size == int(given.get("mamba_ssm", 128))
        assert (config.initializer, config.initializer_range) == (
            ("fan_in", 0.1) if row["model_name"] == "Mamba2" else ("normal", 0.02)
        )
    else:
        heads, step = int(row["n_heads"]), int(given.get("multiple_of", 256))
        assert (config.num_attention_heads, config.head_dim) == (heads, dim // heads)
        assert config.num_key_value_heads == int(given.get("n_kv_heads", heads))
        assert config.intermediate_size == int(given.get("hidden_dim", -(-int(2 * 4 * dim / 3) // step) * step))
        assert config.rope_dim == int(given.get("rope_dim", dim // heads))
        assert config.rope_theta == float(given.get("rope_theta", 10000))
        assert config.qk_norm == bool(row["qk_norm"])
        assert (config.initializer, config.init_base_std, config.init_std_factor) == ("truncated", None, "disabled")
    assert config.mlp == "gated"

    # That the release's arguments give these parameters: tests/models/test_published.py.
    recipe = FULL_SIZE["recipes"][name]
    assert FULL_SIZE["groups"][recipe["group"]]["parameters"] == int(row["parameters"])
    released = parse(recipe["args"]).config()
    check_same(name, config, released)
    same = ("initializer", "initializer_range", "init_base_std", "init_std_factor", "z_loss", "z_loss_weight")
    same += ("zeyuan_layernorm", "max_position_embeddings", "tie_word_embeddings", "vocab_size")
    assert {key: getattr(config, key) for key in same} == {key: getattr(released, key) for key in same}


SMALL = {
    "llama": ["model.num_attention_heads=4"],
    "linear": ["model.num_attention_heads=2", "model.fields.linear_num_heads=2"],
}


@pytest.mark.parametrize(
    ("name", "above"),
    [
        # Logits of a normed vector of d channels have variance d s^2 where the head starts with standard deviation s,
        # and the loss of chance is ln(vocabulary) + d s^2 / 2. Meta lingua's s is d^-1/2, whatever the size:
        # half a nat above, and no recipe of these starts at ln(vocabulary). A normal cut at 3 s has 0.973 s^2.
        ("Llama-1B-Nemo-1T-lr0.002", 0.973 / 2),
        ("LlamaCanon-1B-Nemo-1T-lr0.002", 0.973 / 2),
        # s = 0.02: 0.026 above at the 128 channels here, 0.41 at the 2048 of the recipe.
        ("GLA5Canon-1B-Nemo-1T-lr0.002", 128 * 0.02**2 / 2),
        ("GDN2Canon-1B-Nemo-1T-lr0.002", 128 * 0.02**2 / 2),
        # Uniform in +-d^-1/2, of variance 1 / (3 d): a sixth above at every size.
        ("Mamba2Canon-1B-Nemo-1T-lr0.002", 1 / 6),
    ],
)
def test_the_loss_at_the_start(name, above):
    vocab = 8192
    sizes = SMALL["llama" if name.startswith("Llama") else "linear"]
    sizes = [*sizes, "model.num_hidden_layers=2", "model.hidden_size=128", "model.fields.intermediate_size=256"]
    run = load(find(name), [*sizes, f"model.vocab_size={vocab}", "data.seq_len=128"])
    model = build_model(run).module.eval()
    tokens = torch.randint(vocab, (16, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    assert loss == pytest.approx(math.log(vocab) + above, rel=0.006)
    assert (abs(loss / math.log(vocab) - 1) < 0.02) == (not name.startswith("Llama"))


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("LlamaCanon-1B-Nemo-1T-lr0.02", r' Did you mean "LlamaCanon-1B-Nemo-1T-lr0.002"\?'),
        ("gla5canon-8b-nemo-1t-lr0.003", r' Did you mean "GLA5Canon-8B-Nemo-1T-lr0.003"\?'),
        ("debugg", r' Did you mean "debug"\?'),
        ("zzz", ""),
    ],
)
def test_an_unknown_name(name, guess):
    with pytest.raises(ValueError, match=rf'^unknown recipe "{name}"\.{guess} All {len(recipes())}: canonlm'):
        find(name)


def test_paths_and_recipe_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("my.yaml", "sub/my", "sub/my.yml"):
        assert find(path) == Path(path)
    Path("zzz").touch()
    assert find("zzz") == Path("zzz")
    Path("debug").mkdir()  # a recipe's name refers to the recipe
    assert find("debug").name == "debug.yaml"

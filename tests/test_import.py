"""Importing is light, names come on first use, and transformers knows our models after `import canonlm` alone."""

import runpy
import subprocess
import sys

import pytest
import torch

import canonlm
from canonlm import CanonLMConfig, CanonLMForCausalLM


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_spawned_process_does_not_run_the_command_again():
    """`python -m canonlm` is imported under this name in processes that it spawns: `doctor` started itself again."""
    runpy.run_module("canonlm.__main__", run_name="__mp_main__")


COMPLETE = """
os.environ |= {"_CANONLM_COMPLETE": "complete_bash", "COMP_WORDS": "canonlm play depo --arch l", "COMP_CWORD": "4"}
sys.argv[0] = "canonlm"
try: main([])
except SystemExit: del os.environ["_CANONLM_COMPLETE"]
"""

STARTS = [
    ("import canonlm; dir(canonlm)", "pydantic"),
    ("from canonlm.cli import main; main(['--version'])", "pydantic"),
    ("import canonlm.cli.prepare", "datatrove datasets tokenizers pyarrow"),
    (COMPLETE, "numba"),
    ("assert main(['--help']) == 0", "polars numba"),
    ("assert main(['results', 'size=8B']) == 0", "numba"),
    ("assert main(['play', 'depoo']) == 2", ""),
    ("assert main(['play', 'depo', '--preset', 'tinny']) == 2", ""),
    ("assert main(['play', 'depo', '--lr', 'fast']) == 2", ""),
    ("assert main(['play', 'depo', '--seeds', '0']) == 2", ""),
    ("assert main(['play', 'nowhere.py:Task']) == 2", ""),
    ("assert main(['eval', 'tiny', '--suite', 'hops']) == 2", ""),
    ("assert main(['eval', 'tiny', '--suite', 'multihop', 'kk=1']) == 2", ""),
    ("assert main(['eval', 'tiny', '--suite', 'babilong', 'k=0']) == 2", ""),
    ("assert main(['eval', 'tiny', '--suite', 'harness', '--tasks', '/']) == 2", ""),
    ("import canonlm.tasks, canonlm.report, canonlm.launch.recipes, canonlm.train.config, canonlm.launch.grid", ""),
    ("from canonlm.report import claims_page, page, profile_page, results_page", ""),
]
"""Steps of one process, and what it has not imported after each of them, besides torch and transformers."""


def test_starts_are_light():
    lines = ["import os, sys"]
    for code, unused in STARTS:
        lines += [code, f"heavy = {{*'torch transformers {unused}'.split()}} & {{*sys.modules}}"]
        lines.append(f"assert not heavy, ({code!r}, heavy)")
    python("\n".join(lines))


LIGHT = "; import sys; assert not {'torch', 'transformers'} & {*sys.modules}"


WITHOUT_EXTRAS = """
import importlib.util, sys

BLOCKED = {"plotly", "polars", "pyarrow", "datatrove", "submitit", "datasets", "tiktoken", "sentencepiece", "lm_eval"}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.partition(".")[0] in BLOCKED else find(name, *args)

import torch, canonlm, canonlm.report, transformers
transformers.utils.logging.disable_progress_bar()
from canonlm.cli import main
from transformers import LlamaConfig, LlamaForCausalLM

for name in set(canonlm.__all__) - {"load_runs"}:
    getattr(canonlm, name)
assert canonlm.CanonLayer(8)(torch.ones(1, 3, 8)).shape == (1, 3, 8)
sizes = dict(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
canonlm.canonize(LlamaForCausalLM(LlamaConfig(**sizes)), "ABCD").save_pretrained("host")
ours = canonlm.CanonLMForCausalLM(canonlm.CanonLMConfig(**sizes))
[outcome] = canonlm.check.decoding(ours, [*canonlm.check.CASES][:1])
assert outcome.state == "passed", outcome
assert main(["train", "run.yaml", "--out", "runs/run"]) == 0
assert main(["report", "runs", "--table"]) == 0
try:
    canonlm.load_runs
except ModuleNotFoundError as error:
    print(error)
for words in COMMANDS:
    assert main(words) == 2
"""

NEED_EXTRAS = {
    "play copying": "canonlm play needs the package plotly: pip install 'canonlm[play]'",
    "profile llama,gla5": "canonlm profile needs the package plotly: pip install 'canonlm[play]'",
    "report runs": "this needs the package polars: pip install 'canonlm[play]'",
    "results": "this needs the package polars: pip install 'canonlm[play]'",
    "data dump copying --out a.parquet": "this needs the package pyarrow: pip install 'canonlm[data]'",
    "data prepare new --input run.yaml --tokenizer bytes": "this needs the package datatrove: "
    "pip install 'canonlm[data]'",
    "launch run.yaml --slurm nodes=1": "this needs the package submitit: pip install 'canonlm[cluster]'",
    "eval runs/run --suite harness --tasks piqa": "the lm-evaluation-harness needs the package lm-eval: "
    "pip install 'canonlm[eval]'",
}


@pytest.mark.slow
def test_the_core_needs_no_extra(tiny, tmp_path):
    """One process in which the extras cannot be imported goes through every public door."""
    tiny.yaml(tmp_path / "run.yaml", train={"steps": 2})
    code = WITHOUT_EXTRAS.replace("COMMANDS", repr([words.split() for words in NEED_EXTRAS]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "this needs the package polars: pip install 'canonlm[play]'\n" in done.stdout
    assert done.stderr.splitlines() == [f"canonlm: {line}" for line in NEED_EXTRAS.values()]


def test_names_are_loaded_on_first_use():
    assert canonlm.CanonLayer.__module__ == "canonlm.canon.layer"
    assert canonlm.models.CanonLMConfig is canonlm.CanonLMConfig
    assert set(canonlm.__all__) <= set(dir(canonlm))
    assert len(dir(canonlm)) == len(set(dir(canonlm)))
    for name in set(canonlm.__all__) - {"__version__"}:
        first_line = getattr(canonlm, name).__doc__.splitlines()[0]
        assert len(first_line) > 20, name
    for room in ("canon", "canonize", "core", "launch", "models", "ops", "report", "tasks", "train"):
        assert room in dir(canonlm)
        assert getattr(canonlm, room).__name__ == f"canonlm.{room}"
    with pytest.raises(AttributeError, match="module 'canonlm' has no attribute 'CanonLayr'"):
        _ = canonlm.CanonLayr


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CanonLMForCausalLM(CanonLMConfig(**sizes, canon_set="ABCD", init_seed=7)).eval()
    model.save_pretrained(folder)
    return folder, model


FROM_PRETRAINED = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained({folder!r})
model = transformers.AutoModelForCausalLM.from_pretrained({folder!r}).eval()
import canonlm
assert type(config) is canonlm.CanonLMConfig and type(model) is canonlm.CanonLMForCausalLM
assert transformers.AutoConfig.for_model("llama").model_type == "llama"
tables = [finder.table for finder in sys.meta_path if type(finder).__module__.startswith("canonlm")]
assert tables == ["peft.utils.constants"] or "peft" in sys.modules and not tables
print(model(torch.arange(9)[None]).logits.double().sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import canonlm" + LIGHT,
        "import transformers; transformers.AutoModelForCausalLM; import sys, canonlm; "
        "assert 'canonlm.models' not in sys.modules",
        # These import the auto classes while half of transformers is still being imported.
        "import canonlm, transformers.modeling_layers",
        "import canonlm; from transformers import pipeline, Trainer",
    ],
)
def test_from_pretrained(saved, first):
    folder, model = saved
    printed = python(first + FROM_PRETRAINED.format(folder=str(folder)))
    assert float(printed) == model(torch.arange(9)[None]).logits.double().sum().item()

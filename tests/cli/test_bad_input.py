"""Every mistake of a user: exit code 2, one line on standard error that begins "canonlm: ", nothing written."""

import io
import shlex
import sys

import pytest
from abuse.bases import ONE_STEP

from canonlm.cli import main
from canonlm.launch.recipes import recipes

MISTAKES = [
    ("play copyin", 'unknown task "copyin". Did you mean "copying"? Tasks: arithmetic, automaton,'),
    ("play copying --arch lama", 'unknown architecture "lama". Did you mean "llama"?'),
    ("play copying --arch llama,", 'unknown architecture "".'),
    ("play copying --arch llama --arch gla", '--arch: expected one list, separated by commas, got "2 lists"'),
    (
        "play copying --difficulty hard",
        "--difficulty only works with presets of papers: the tiny preset of copying has only one",
    ),
    ("play copying train.stepz=3", 'unknown setting "train.stepz". Did you mean "train.steps"?'),
    ("play copying speed=3", 'unknown setting "speed".'),
    ("play copying train.steps=ten", 'train.steps: expected an integer > 0, got "ten"'),
    ("play copying train.optim.weight_decay=.inf", "train.optim.weight_decay: expected a number >= 0, got inf"),
    ("play copying train.optim.lr=1e-3", "train.optim.lr is set by the option --lr"),
    ("play copying train.seed=1", "train.seed is set by the option --seeds"),
    ("play copying train.device=abacus", "train.device: expected auto, cpu or a device that torch sees here"),
    ("play copying task.M=1", 'unknown setting "task.M".'),
    ("play copying model.fields.rope_dim=64", "model.fields.rope_dim: expected an even number from 0"),
    ("play copying model.fields.rope_theta=x", 'model.fields.rope_theta: expected a number, got "x"'),
    ("play copying steps", 'setting: expected KEY=VALUE, such as train.steps=100, got "steps"'),
    ("play copying a=[1", 'a: expected a YAML value, got "[1"'),
    ("play copying --lr fast", "--lr: expected numbers separated by commas"),
    ("play copying --lr 1e-3,-1", "train.optim.lr: expected a number > 0, got -1.0"),
    ("play copying --seeds 0", "--seeds: expected an integer from 1 to 1000, got 0"),
    ("play copying --seeds 99999999", "--seeds: expected an integer from 1 to 1000, got 99999999"),
    ("play copying --seeds two", '--seeds: expected an integer, got "two"'),
    ("play copying --jobs 0", "--jobs: expected an integer >= 1, got 0"),
    ("play copying --stepz 3", "No such option: --stepz. Settings are written without dashes: KEY=VALUE"),
    ("play copying --arch qwen3+canon", 'unknown architecture "qwen3". Did you mean "hf:qwen3"?'),
    ("play copying --arch mine.py", "arch: expected FILE.py:NAME, a mixer or a model in that file"),
    ("play copying --arch llamaa=1 llamab=2", "arch: expected quotes around names with braces: 'llama{"),
    ("play file.py", "name: expected FILE.py:NAME or package.module:NAME"),
    ("play script:parity", "script: ModuleNotFoundError: No module named 'script'. A file is named script.py:NAME"),
    ("play copying --out ''", '--out: expected a path (. is the current folder), got ""'),
    ("play copying --out file", "--out: expected a folder that can be written (Not a directory)"),
    ("play copying --out file/below", "--out: expected a folder that can be written (Not a directory)"),
    ("plya", "No such command 'plya'."),
    ("play", "TASK is missing: `canonlm play --help` explains it"),
    ("train missing.yaml", "missing.yaml: cannot be read (No such file or directory)"),
    ("train good.yml", 'good.yml: cannot be read (No such file or directory; did you mean "good.yaml"?)'),
    ("replicate god.yaml", 'god.yaml: cannot be read (No such file or directory; did you mean "good.yaml"?)'),
    ("play copying --arch their.py:Mine", 'arch: their.py: No such file or directory; did you mean "there.py"? ('),
    (
        "report playd",
        "folder: expected a folder with runs or results of `canonlm eval` in it (No such file or directory; did you "
        'mean "played"?), got "playd"',
    ),
    ("train broken.yaml", "broken.yaml, line 2: not YAML: "),
    ("train wrong.yaml", 'train.optim.lr: expected a number > 0, got "3e-3x"  (in wrong.yaml, line 5)'),
    ("train good.yaml --out file", "--out: expected a folder that can be written (Not a directory)"),
    (
        "train good.yaml train.batch_size=3 --out run",
        "train.batch_size: expected 2, as in the run that is already in run (choose another --out to change it), got 3",
    ),
    ("train good.yaml train.optim.lr=1e-3 --out run", "train.optim.lr: expected 0.01, as in the run that is already"),
    (
        "play copying --arch llama+canon,llama --out played",
        "preset: expected None, as in the run that is already in played/runs/copying-llama-lr0.003-seed0",
    ),
    ("play copying --arch gdn2 --out played", "played/runs/copying-gdn2-lr0.003-seed0/config.yaml, line 2: not YAML"),
    (
        "play copying --out damaged",
        '--out: expected a folder whose play.json can be read (remove the damaged file), got "damaged/play.json"',
    ),
    ("report nowhere", "folder: expected a folder with runs or results of `canonlm eval` in it"),
    ("data show copyin", 'unknown task "copyin". Did you mean "copying"?'),
    ("data show copying N=3", 'unknown setting "N". Did you mean "task.N"? Settings: task.N, task.'),
    ("data show copying train.steps=3", 'unknown setting "train.steps". '),
    ("play depo N=100", 'unknown setting "N". Did you mean "task.N"? Settings: arch, '),
    ("play copying lr=1e-3", 'unknown setting "lr". Did you mean "train.optim.lr"? '),
    ("play copying seed=1", 'unknown setting "seed". Did you mean "data.seed" or "train.seed"? '),
    ("plan depo N=100", 'unknown setting "N". Did you mean "task.N"? '),
    ("recipes show debug steps=3", 'unknown setting "steps". Did you mean "train.steps"? '),
    ("data show copying --split tst", 'unknown split "tst". Did you mean "test"?'),
    ("data show copying --n 0", "--n: expected a number >= 1"),
    ("eval run", "--suite is missing: `canonlm eval --help` explains it"),
    ("train run", 'RECIPE: expected a YAML file, such as run/config.yaml, which repeats that run, got "run"'),
    (
        "plan depoo",
        f'unknown recipe "depoo". All {len(recipes())}: canonlm recipes list. Or give a YAML file. Or did you mean',
    ),
    ("plan depo --gpu H200", 'unknown GPU "H200". Did you mean "h200"? GPUs: a10,'),
    ("work run --gpu h100", "--gpu only works with --dry-run"),
    ("claims run", "ID: expected a claim, such as C06 (--runs FOLDER shows the claims by your results)"),
    ("check lama+canon", 'unknown architecture "lama". Did you mean "llama"?'),
    ("check llama --cases=", '--cases: expected names separated by commas, got ""'),
    ("check llama --json no/x.json", "--json: expected a file in a folder that exists"),
    ("doctor --json no/x.json", "--json: expected a file in a folder that exists"),
    ("plan Llama-8B-Nemo-1T-lr0.02", 'unknown recipe "Llama-8B-Nemo-1T-lr0.02". Did you mean'),
    ("plan Llama-8B-Nemo-1T-lr0.002 --gpus 0", '--gpus: expected integers >= 1, separated by commas, got "0"'),
    ("plan Llama-8B-Nemo-1T-lr0.002 parallel.tp=3 --gpus 6", "parallel.tp: expected a divisor of num_attention"),
    ("plan GLA5conv-8B-Nemo-1T-lr0.002 parallel.tp=3 --gpus 6", "parallel.tp: expected a divisor of gla's num_heads"),
    (
        "plan Llama-8B-Nemo-1T-lr0.002 parallel.micro_batch_size=7",
        "parallel.micro_batch_size: expected a divisor of 192",
    ),
    ("recipes diff debug nowhere.yaml", "nowhere.yaml: cannot be read (No such file or directory)"),
    ("recipes show debug train.stepz=1", 'unknown setting "train.stepz". Did you mean "train.steps"?'),
    ("results --group standrad", 'unknown group "standrad". Did you mean "standard"? Groups: babilong, brevo, depo'),
    ("results nowhere", "folder: expected a folder with runs"),
    ("results --curves", "--curves only works with --csv or --json"),
    ("results --curves --paired --csv -", "--paired cannot be used with --curves"),
    ("results --csv - --json -", "--csv and --json cannot both write to the terminal"),
    ("results --csv nowhere/x.csv", "--csv: expected a file that can be written (No such file or directory)"),
    ("new taks mine.py", 'unknown kind "taks". Did you mean "task"? Kinds: experiment, mixer, task.'),
    ("new task mine.txt", 'FILE: expected a name that ends in .py, got "mine.txt"'),
    ("new experiment mine.py", 'FILE: expected a name that ends in .yaml, got "mine.py"'),
    ("new task there.py", 'FILE: expected a file that does not exist yet, got "there.py"'),
    ("new task no/mine.py", "FILE: expected a file that can be written (No such file or directory)"),
    ("profile lama", 'unknown architecture "lama"'),
    ("profile llama --seeds 0", "--seeds: expected an integer from 1 to 100, got 0"),
    ("profile llama --only=", '--only: expected names separated by commas, got ""'),
    ("profile llama --sizes 2L64D,,", '--sizes: expected names separated by commas, got "2L64D,,"'),
    ("profile llama --jobs 0", '--jobs: expected a number >= 1, got "0"'),
    ("profile llama train.steps=10", 'canonlm profile takes no settings, got "train.steps=10"; `canonlm play` does'),
    ("profile llama --match flops", '--match: expected parameters, state or state,parameters, got "flops"'),
    ("replicate fig7 --scale mirco", 'unknown scale "mirco". Did you mean "micro"?'),
    ("replicate fig7 --only depo-mikro", 'unknown setting or claim "depo-mikro". Did you mean "depo-micro"?'),
    ("replicate fig7 --only=", '--only: expected names separated by commas, got ""'),
    ("replicate predict --only=", "canonlm replicate predict trains nothing, and takes --out and --figures alone"),
    ("replicate hops --scale paper", "hops has no paper scale; it has: micro, small"),
    ("replicate fig7 --dry-run --gpu h1000", 'unknown GPU "h1000". Did you mean "h100"?'),
    ("replicate fig7 time=1:00:00", "time=1:00:00: settings of a job only work with --slurm"),
    ("replicate predict --out page.html", "--out: expected a folder, for the page prediction.html"),
    ("replicate predict --only C06", "canonlm replicate predict trains nothing, and takes --out and --figures alone"),
    (
        "replicate fig4 --figures figures",
        "--figures only works with predict; canonlm claims --figures DIR draws the verdicts",
    ),
    (
        "results --paired --figures figures",
        "--figures cannot be used with --curves, --paired or --group: the page has all of them",
    ),
    ("replicate predit", 'unknown experiment "predit". Did you mean "predict"?'),
    ("claims C06 --check-registration", "--check-registration checks all claims, and takes no other option"),
    ("profile llama --quick --until 90%", '--until: expected no value with --quick, got "90%"'),
    ("claims C99", 'unknown claim "C99"'),
    ("claims --out claims.pdf", "--out: expected a file that ends in .html or .md"),
    ("claims --runs nowhere", "--runs: expected a folder with CSV files"),
    ("claims --scale tiny", 'unknown scale "tiny"'),
    ("play text --preset paper", "--preset: expected tiny or small, for text"),
    ("play text --difficulty hard", "--difficulty does not apply to text"),
    (
        "play text data=nowhere",
        "text.sources.nowhere.path: nowhere: expected a folder that `canonlm data prepare` finished",
    ),
    ("data multihop hops.txt", 'OUT: expected a name that ends in .jsonl, got "hops.txt"'),
    ("data multihop there.jsonl", 'OUT: expected a file that does not exist yet, got "there.jsonl"'),
    (
        "data multihop no/hops.jsonl",
        'OUT: expected a file that can be written (No such file or directory), got "no/hops.jsonl"',
    ),
    ("data multihop hops.jsonl n=10", "n is an option of this command: --n 10"),
    ("data multihop hops.jsonl seed=1", "seed is an option of this command: --seed 1"),
    ("data multihop hops.jsonl --split dev", 'unknown split "dev". Splits: test, train, valid, validation.'),
    ("data prepare out --input a.jsonl --tokenizer bytes cpu", 'executor option: expected KEY=VALUE, got "cpu"'),
    ("data prepare out --input a.jsonl --tokenizer bytes --text-key", "Option '--text-key' requires an argument."),
]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "file": "mine",
        "there.jsonl": "mine",
        "there.py": "mine",
        "script.py": "",
        "a.jsonl": '{"text": "abc"}\n',
        "good.yaml": ONE_STEP,
        "wrong.yaml": ONE_STEP.replace("0.01", "3e-3x"),
        "broken.yaml": "a: [1,\nb: }",
        "run/config.yaml": ONE_STEP,
        "damaged/play.json": '{"sections": [{"id": "", "command": "", "runs": [{}]}]}',
        "played/runs/copying-llama-lr0.003-seed0/config.yaml": ONE_STEP,
        "played/runs/copying-gdn2-lr0.003-seed0/config.yaml": "arch: [",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(("command", "start"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_one_line_and_nothing_written(workdir, assert_refused, command, start):
    arguments = shlex.split(command)
    if arguments[0] in ("play", "train", "profile", "replicate") and "--out" not in arguments:
        arguments += ["--out", "out"]
    assert_refused(arguments, start)


def test_standard_output_may_be_closed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["archs"]) == 0
    assert main(["results", "--csv", "-"]) == 2
    assert capsys.readouterr().err == 'canonlm: --csv: expected a file, or - with an open standard output, got "-"\n'


def test_standard_output_may_lack_a_character(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["archs"]) == 0
    assert rb"\u2026" in stream.buffer.getvalue()


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    output = capsys.readouterr()
    assert "play" in output.out
    assert output.err == ""


def test_no_sentence_of_a_help_text_becomes_a_list(capsys):
    """Markdown reads a line that begins with "1." as a list."""
    assert main(["check", "--help"]) == 0
    assert "both end with exit code 1. refused means" in " ".join(capsys.readouterr().out.split())


def test_an_interruption_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("canonlm.tasks.names", interrupted)
    assert main(["tasks"]) == 130
    assert capsys.readouterr().err == "canonlm: interrupted\n"

"""One run on several processes: the numbers of a single one, even after stops and kills; one message per mistake."""

import json
import os
import signal
import socket
import time

import pytest
import torch
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from canonlm.cli import main
from canonlm.launch.processes import free_port

SECONDS = 600  # for a few processes on a busy machine; longer means a hang


def _one_of(count, rank, port, folder, args):
    """The main function of one process, as if `torchrun` had started it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"note-{rank}")
    log = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    raise SystemExit(main([str(arg) for arg in args]))


@pytest.fixture
def processes(start, tmp_path):
    """`processes(count, *args)`: that many processes (or these of two) with `canonlm *args`; `.join()` gives their exit
    codes."""
    groups = []

    class Group:
        def __init__(self, count, *args):
            port = free_port()
            self.folder = tmp_path / f"output-{len(groups)}"
            self.folder.mkdir()
            ranks, count = (count, 2) if isinstance(count, list) else (range(count), count)
            for rank in ranks:
                (self.folder / f"rank-{rank}.txt").touch()
            self.members = [start(_one_of, count, rank, port, self.folder, args) for rank in ranks]
            groups.append(self)

        def join(self):
            end = time.monotonic() + SECONDS
            for process in self.members:
                process.join(max(0.1, end - time.monotonic()))
            assert not any(process.is_alive() for process in self.members), "some process hangs"
            return [process.exitcode for process in self.members]

        def output(self):
            return [(self.folder / f"rank-{rank}.txt").read_text() for rank in range(len(self.members))]

        def kill(self):
            for process in self.members:
                process.kill()
                process.join()

    yield Group
    for group in groups:
        group.kill()


def losses(tiny, folder):
    return [row["loss"] for row in tiny.rows(folder)]


@pytest.mark.slow
def test_several_processes_start_from_weights(tiny, processes, tmp_path):
    path = tiny.yaml(tmp_path / "run.yaml", train={"steps": 9})
    host = LlamaConfig(vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(host).save_pretrained(tmp_path / "host")
    args = ["train", path, f"model.weights={tmp_path / 'host'}", "arch=+canon", 'train.freeze=["*", "!*canon*"]']
    for count in (1, 2):
        assert processes(count, *args, "--out", tmp_path / f"of-{count}").join() == [0] * count
    one, two = (losses(tiny, tmp_path / f"of-{count}") for count in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)


CP = ["parallel.cp=2"]


@pytest.mark.parametrize(
    "groups",
    [
        [(2, []), (1, [])],
        [(2, CP), (1, [])],
        pytest.param([(2, []), (4, [])], marks=pytest.mark.slow),
        pytest.param([(4, CP), (1, []), (2, [])], marks=pytest.mark.slow),
    ],
)
def test_several_processes_equal_one_and_resume_each_other(tiny, reference, processes, tmp_path, groups):
    path, out = tiny.yaml(tmp_path / "run.yaml"), tmp_path / "run"
    for count, layout in groups:
        assert processes(count, "train", path, *layout, "--out", out).join() == [0] * count
        assert losses(tiny, out) == pytest.approx(losses(tiny, reference), rel=1e-4)
        windows = [[(row["step"], row.get("windows")) for row in tiny.rows(folder)] for folder in (out, reference)]
        assert windows[0] == windows[1]
        assert json.loads((out / "env.json").read_text())["processes"] == count
        tiny.back_to(out, 30)


@pytest.mark.slow
def test_a_suspended_process_is_waited_for(tiny, processes, tmp_path):
    """As if its machine is suspended or swaps: the run continues, bit for bit."""
    changes = {"train": {"steps": 60, "checkpoint_every": 20, "log_every": 1, "eval_every": 30}}
    path, out = tiny.yaml(tmp_path / "run.yaml", **changes), tmp_path / "run"
    assert processes(2, "train", path, "--out", tmp_path / "undisturbed").join() == [0, 0]
    group = processes(2, "train", path, "--out", out)
    _wait_for_steps(group, out)
    os.kill(group.members[1].pid, signal.SIGSTOP)
    time.sleep(3)
    assert not (out / "result.json").exists()
    os.kill(group.members[1].pid, signal.SIGCONT)
    assert group.join() == [0, 0]
    tiny.same(out, tmp_path / "undisturbed")


@pytest.mark.every(2)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_and_ends_the_run(tiny, processes, tmp_path, frozen):
    changes = {"train": {"steps": 10_000, "log_every": 1, "eval_every": 10_000}, "parallel": {"timeout": 5.0}}
    path, out = tiny.yaml(tmp_path / "run.yaml", **changes), tmp_path / "run"
    group = processes(2, "train", path, "--out", out)
    _wait_for_steps(group, out)
    os.kill(group.members[frozen].pid, signal.SIGSTOP)
    other = group.members[1 - frozen]
    other.join(SECONDS)
    assert other.exitcode == 1
    who = f"canonlm: rank {frozen} (process {group.members[frozen].pid} on {socket.gethostname()})"
    assert f"{who} has sent no heartbeat for 5 s (parallel.timeout)" in group.output()[1 - frozen]


SLOW = """
import os, time
from canonlm.tasks import Answer, task

drawn = []

@task(vocab=["no", "yes"], max_len=2, chance=0.5)
def slow(rng, test):
    drawn.append(test)
    if os.environ["RANK"] == "{rank}" and len(drawn) == 400:
        time.sleep(12)
    return ["no", Answer(rng.choice(["no", "yes"]))]
"""


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="torch 2.10 does not record gloo's exchanges")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_process_is_named_and_waited_for(tiny, processes, tmp_path, rank):
    """Its heartbeats go on: it reads data, say, from a disk that does not answer."""
    (tmp_path / "task.py").write_text(SLOW.replace("{rank}", str(rank)))
    path = tiny.yaml(tmp_path / "run.yaml", data={"workers": 0}, parallel={"timeout": 5.0})
    task = f"task={{name: {tmp_path}/task.py:slow}}"
    group = processes(2, "train", path, task, "--trust", "--out", tmp_path / "run")
    assert group.join() == [0, 0]
    who = f"rank {rank} (process {group.members[rank].pid} on {socket.gethostname()})"
    line = f"canonlm: for 5 s, the other processes have waited for {who}"
    assert [output.count(line) for output in group.output()] == [1, 0]
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [waits] = [row for row in rows if (row.get("data_wait_s") or 0) > 10]
    assert (waits["data_wait_rank"], waits["data_wait_share"] > 0.5) == (rank, True)
    assert {row["memory_rank"] for row in rows if row["kind"] == "train"} <= {0, 1}


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_process_that_never_joins_is_named(tiny, processes, tmp_path, rank, missing):
    path = tiny.yaml(tmp_path / "run.yaml", parallel={"start_timeout": 2.0})
    [process] = (group := processes([rank], "train", path, "--out", tmp_path / "run")).members
    process.join(SECONDS)
    assert process.exitcode == 2
    assert [json.loads(note.read_text())["message"] for note in group.folder.glob("note-*")] == [
        f"rank {missing} has not joined the run within 2 s (parallel.start_timeout)"
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "abc"}, 'RANK: expected an integer >= 0 and < 1, the number of processes, got "abc"'),
        ({"RANK": "2", "WORLD_SIZE": "2"}, 'RANK: expected an integer >= 0 and < 2, the number of processes, got "2"'),
        ({"WORLD_SIZE": "0"}, 'WORLD_SIZE: expected an integer >= 1, got "0"'),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: expected"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR: expected"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "MASTER_PORT: expected"),
    ],
)
def test_wrong_variables_of_a_launcher_are_named(tiny, tmp_path, monkeypatch, capsys, variables, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tiny.yaml(tmp_path / "run.yaml")), "--out", str(tmp_path / "run")]) == 2
    says_it = variables.get("RANK") != "2"  # the first process prints
    assert (f"canonlm: {message}" in capsys.readouterr().err) is says_it


def _wait_for_steps(group, out):
    """Wait until the run has written some rows."""
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"train"') < 3:
        assert all(process.is_alive() for process in group.members)
        time.sleep(0.002)


@pytest.mark.slow
def test_a_signal_to_any_process_stops_all(tiny, processes, tmp_path):
    changes = {"train": {"steps": 2000, "checkpoint_every": 2000, "eval_every": 2000}}
    path, out = tiny.yaml(tmp_path / "run.yaml", **changes), tmp_path / "run"
    group = processes(2, "train", path, "--out", out)
    _wait_for_steps(group, out)
    os.kill(group.members[1].pid, signal.SIGTERM)
    assert group.join() == [130, 130]
    first, second = group.output()
    assert "canonlm: stopped after step " in first
    assert second == ""
    assert len(tiny.checkpoints(out)) == 1


MISTAKES = {
    "unknown key": ({"train": {"stepss": 3}}, 'unknown setting "train.stepss". Did you mean "train.steps"?'),
    "wrong type": ({"train": {"steps": "many"}}, "train.steps: expected an integer > 0"),
    "batch": ({"train": {"batch_size": 3}}, "train.batch_size: expected a multiple of 2, the number of processes"),
    "micro-batch": ({"parallel": {"micro_batch_size": 3}}, "parallel.micro_batch_size: expected a divisor of 2"),
    "tp": ({"parallel": {"tp": 4}}, "parallel.tp: expected a divisor of 2"),
    "cp": ({"arch": "hf:llama", "parallel": {"cp": 2}}, "parallel.cp: expected 1 with hf:llama"),
    "no text": ({"task": None, "text": {"sources": {"web": {"path": "no/such/folder"}}}, "data": {"loss_on": "all"}},
                "text.sources.web.path: no/such/folder: expected a folder that `canonlm data prepare` finished"),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_once_and_no_process_waits(tiny, processes, tmp_path, mistake):
    changes, message = MISTAKES[mistake]
    group = processes(2, "train", tiny.yaml(tmp_path / "run.yaml", **changes), "--out", tmp_path / "run")
    assert group.join() == [2, 2]
    first, second = group.output()
    assert first.startswith(f"canonlm: {message}")
    assert first.count("\n") == 1
    assert second == ""


@pytest.mark.slow
def test_an_error_in_one_process_stops_both(tiny, processes, tmp_path):
    """Only the first process checks the folder, but both find the checkpoint of another model."""
    path, out = tiny.yaml(tmp_path / "run.yaml"), tmp_path / "run"
    assert main(["train", str(path), "--out", str(out)]) == 0
    other = tiny.yaml(tmp_path / "other.yaml", arch="llama")
    group = processes(2, "train", other, "--out", out)
    assert group.join() == [2, 2]
    assert group.output()[0].startswith("canonlm: arch: expected 'llama+canon', as in the run that is already in")
    tiny.back_to(out, 30)
    (out / "config.yaml").unlink()
    group = processes(2, "train", other, "--out", out)
    assert group.join() == [2, 2]
    first, second = group.output()
    assert first.startswith("canonlm: ")
    assert ": of another run than config.yaml: arch is " in first
    assert second == ""

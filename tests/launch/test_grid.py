"""Planning a grid and running it: when each run starts, what is reported, and that no process is left behind."""

import json
import os
import signal
import sys
import threading
import time

import pytest
import torch

from canonlm.core.distributed import World
from canonlm.launch import local, queue
from canonlm.launch.grid import PlannedRun, plan, sweep, write_plan
from canonlm.launch.play import Progress, default_jobs, run_grid
from canonlm.launch.recipes import load_preset
from canonlm.runs.identity import group
from canonlm.runs.load import load_run
from canonlm.train.config import differences
from canonlm.train.load_config import create_folder
from canonlm.train.loop import _Run

SMALL = ["task.N=8", "data.seq_len=18", "task.min_items=2", "model.hidden_size=16", "train.batch_size=4"]


def copying(out, **options):
    options = {"archs": ["llama", "llama+canon=A"], "overrides": SMALL, **options}
    return plan(load_preset("copying", "tiny"), out, **options)


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_every_architecture_at_every_rate_and_seed(tmp_path):
    runs = copying(tmp_path, lrs=[1e-3, 3e-3], seeds=2)
    assert [run.name for run in runs] == [
        f"copying-{arch}-1L16d-8a7a66-lr{lr}-seed{seed}"
        for arch in ("llama", "llama+canon=A")
        for lr in ("0.001", "0.003")
        for seed in (0, 1)
    ]
    for run in runs:
        changed = {key for key, _, _ in differences(runs[0].config, run.config)}
        assert changed <= {"arch", "train.optim.lr", "train.seed"}
    assert list(tmp_path.iterdir()) == []


def test_a_run_requested_twice_runs_once(tmp_path):
    assert len(copying(tmp_path, archs=["llama", "llama"], lrs=[1e-3, 0.001])) == 1
    assert len(copying(tmp_path, archs=["llama"], overrides=["train.optim.weight_decay=0.1,1e-1"])) == 1


def test_rates_that_are_equal_in_six_digits_are_two_runs(tmp_path):
    rates = [10**-3.5, 0.0003162278]
    runs = copying(tmp_path, archs=["llama"], lrs=rates, seeds=1)
    name = "copying-llama-1L16d-8a7a66-lr{}-seed0"
    assert [run.name for run in runs] == [name.format(rate) for rate in rates]
    assert [run.config.train.optim.lr for run in runs] == rates
    create_folder(tmp_path / "runs" / name.format("0.000316228"), runs[0].config)  # as earlier versions named it
    again = copying(tmp_path, archs=["llama"], lrs=rates, seeds=1)
    assert [run.name for run in again] == [name.format(rate) for rate in ("0.000316228", rates[1])]


def test_a_sweep_over_any_settings(tmp_path):
    overrides = ["train.batch_size=4,8", "model.hidden_size=16,32", "train.steps=5", "train.eval_size=8", "task.N=8"]
    runs = copying(tmp_path, archs=["llama"], lrs=[1e-3, 3e-3], overrides=[*overrides, "data.seq_len=40"])
    result = {(r.config.train.batch_size, r.config.model.hidden_size, r.config.train.optim.lr) for r in runs}
    assert result == {(batch, width, lr) for batch in (4, 8) for width in (16, 32) for lr in (1e-3, 3e-3)}
    assert len({run.name for run in runs}) == len(runs) == 8
    for run in runs:  # all settings would be too long, so swept ones are separate
        width, batch = run.config.model.hidden_size, run.config.train.batch_size
        shape = "" if width == 32 else f"-1L{width}d"  # 32 is the preset's
        rest = f"-seq_len40-N8-eval_size8-steps5-batch_size{batch}-lr{run.config.train.optim.lr:g}-seed0"
        assert run.name == f"copying-llama{shape}{rest}"
    assert len({group(run.config.model_dump()) for run in runs}) == 4  # the report pools rates and seeds alone


def test_a_run_of_a_plain_command_keeps_its_name_in_a_sweep(tmp_path):
    fixed = [*SMALL[:-1], "train.steps=5", "train.eval_size=8"]
    (run,) = copying(tmp_path, archs=["llama"], overrides=[*fixed, "train.batch_size=4"])
    write_plan([run], load_preset("copying", "tiny"), tmp_path, "")
    names = [run.name for run in copying(tmp_path, archs=["llama"], overrides=[*fixed, "train.batch_size=4,8"])]
    assert names[0] == run.name
    assert "-batch_size8-" in names[1]


def test_a_sweep_over_the_task_has_a_section_per_task(tmp_path):
    overrides = [*SMALL[2:], "task.N=8,9", "data.seq_len=20"]
    runs = copying(tmp_path, archs=["llama"], overrides=overrides)
    write_plan(runs, load_preset("copying", "tiny"), tmp_path, "")
    sections = json.loads((tmp_path / "play.json").read_text())["sections"]
    assert [section["runs"] for section in sections] == [[run.name] for run in runs]
    assert [section["task"]["N"] for section in sections] == [8, 9]
    assert [load_run(run.folder).task.chance["first=1"] for run in runs] == [1 / 8, 1 / 9]


def test_a_sweep_that_would_repeat_one_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^train.log_every: several values would repeat one run, as"):
        copying(tmp_path, overrides=[*SMALL, "train.log_every=5,10"])


@pytest.mark.parametrize(
    ("pair", "values"),
    [
        ("a=1,2", ["a=1", "a=2"]),
        ("a=1, 2,1", ["a=1", "a= 2"]),
        ("a=[1,2]", ["a=[1,2]"]),
        ("a=[1,2],[3]", ["a=[1,2]", "a=[3]"]),
        ("a={x: 1, y: [2,3]}", ["a={x: 1, y: [2,3]}"]),
        ("a='1,2'", ["a='1,2'"]),
        ("a='x,y',\"z\"", ["a='x,y'", 'a="z"']),
        ("a=don't,do", ["a=don't", "a=do"]),
        ("data=some,where", ["data=some,where"]),
        ("a", ["a"]),
    ],
)
def test_commas_separate_values_but_not_within_one(pair, values):
    points, swept = sweep([pair])
    assert points == [[value] for value in values]
    assert swept == (["a"] if len(values) > 1 else [])


@pytest.mark.parametrize("pair", ["a=1,", "a=,1", "a=1,,2"])
def test_a_value_that_is_missing(pair):
    with pytest.raises(ValueError, match=r"^a: expected values separated by commas, such as 32,64, got "):
        sweep([pair])


def test_every_architecture_sees_the_same_data(tmp_path):
    first, second = copying(tmp_path)
    streams = []
    for planned in (first, second):
        planned.folder.mkdir(parents=True)
        run = _Run(planned.config, planned.folder, World(torch.device("cpu")), lambda row: None)
        streams.append([run.stream.rows(0, 20), run.test.stream.rows(0, 8)])
    for a, b in zip(*streams, strict=True):
        assert (a.input_ids == b.input_ids).all()
        assert (a.targets == b.targets).all()


def test_a_second_play_adds_architectures_sizes_and_settings(tmp_path):
    """Differences from the preset are in the name, so nothing collides and nothing is refused."""
    preset, depo = load_preset("copying", "tiny"), load_preset("depo", "tiny")
    names = []
    for changed in ([], ["model.hidden_size=64"], ["model.num_hidden_layers=2"], ["model.num_attention_heads=4"],
                    ["train.steps=200"], ["train.steps=300"], ["train.log_every=7"]):  # fmt: skip
        runs = copying(tmp_path, archs=["llama"], overrides=changed)
        write_plan(runs, preset, tmp_path, f"canonlm play copying {' '.join(changed)}".strip())
        names += [run.name for run in runs]
    assert names == [f"copying-llama{part}-lr0.003-seed0" for part in
                     ("", "-1L64d", "-2L32d", "-1L32d4h", "-steps200", "-steps300", "")]  # fmt: skip
    write_plan(plan(depo, tmp_path, archs=["llama"]), depo, tmp_path, "canonlm play depo")
    write_plan(copying(tmp_path, archs=["gdn2"], overrides=[]), preset, tmp_path, "canonlm play copying --arch gdn2")
    play = json.loads((tmp_path / "play.json").read_text())
    assert [section["heading"] for section in play["sections"]] == ["copying", "depo"]
    assert play["sections"][0]["runs"] == [*names[:-1], "copying-gdn2-lr0.003-seed0"]
    commands = play["command"].splitlines()
    assert [commands[0], *commands[-2:]] == [
        f"canonlm play {words}" for words in ("copying", "copying --arch gdn2", "depo")
    ]
    assert preset == load_preset("copying", "tiny")


def test_a_run_of_an_earlier_version_resumes_under_its_name(tmp_path):
    """Earlier versions did not include differences from the preset in the name."""
    (run,) = copying(tmp_path, archs=["llama"])
    write_plan([run], load_preset("copying", "tiny"), tmp_path, "")
    run.folder.rename(run.folder.parent / "copying-llama-lr0.003-seed0")
    assert [run.name for run in copying(tmp_path, archs=["llama"])] == ["copying-llama-lr0.003-seed0"]
    (other,) = copying(tmp_path, archs=["llama"], overrides=[*SMALL, "train.steps=5"])
    assert other.name != "copying-llama-lr0.003-seed0"
    (tmp_path / "runs" / "copying-llama-lr0.003-seed0" / "config.yaml").write_text("{")
    assert copying(tmp_path, archs=["llama"])[0].name == run.name


def test_a_section_of_another_version_is_continued(tmp_path):
    """That version did not write the settings of the task."""
    preset = load_preset("copying", "tiny")
    runs = copying(tmp_path)
    write_plan(runs[:1], preset, tmp_path, "earlier")
    play = json.loads((tmp_path / "play.json").read_text())
    [section] = play["sections"]
    task = section.pop("task")
    (tmp_path / "play.json").write_text(json.dumps(play))
    write_plan(runs, preset, tmp_path, "now")
    [section] = json.loads((tmp_path / "play.json").read_text())["sections"]
    assert section["runs"] == [run.name for run in runs]
    assert section["task"] == task


@pytest.mark.parametrize("text", ['{"sections": [', "{}", '{"sections": 5}', '{"sections": [1]}', '{"sections": [{}]}'])
def test_a_damaged_play_json_is_reported_and_kept(tmp_path, text):
    (tmp_path / "play.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected a folder whose play\.json can be read"):
        write_plan(copying(tmp_path), load_preset("copying", "tiny"), tmp_path, "")
    assert (tmp_path / "play.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["play.json"]


def test_a_plan_that_is_refused_leaves_no_folder_of_its_own(tmp_path):
    """A file stands where the last run's folder would be."""
    begun, new, taken = copying(tmp_path, archs=["llama", "llama+canon=A", "gdn2"])
    create_folder(begun.folder, begun.config)
    taken.folder.write_text("mine")
    with pytest.raises(ValueError, match="--out: "):
        write_plan([begun, new, taken], load_preset("copying", "tiny"), tmp_path, "")
    assert {*(tmp_path / "runs").iterdir()} == {begun.folder, taken.folder}
    assert (begun.folder / "config.yaml").exists()
    assert taken.folder.read_text() == "mine"


# -- running it, with a stand-in for the training process -------------------------------------------------------------

CHILD = """\
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
(folder / "env").write_text(json.dumps([os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")]))
def save(*_):
    end = time.monotonic() + plan.get("saves", 0)
    while time.monotonic() < end and (folder / "began").exists():
        time.sleep(0.01)
    (folder / "saved").touch()
    sys.exit(130)
plan = json.loads(pathlib.Path(PLAN).read_text())[folder.name]
signal.signal(signal.SIGTERM, save)
(folder / "began").write_text(str(time.time()))
if plan.get("frozen"):
    os.kill(os.getpid(), signal.SIGSTOP)
end = time.monotonic() + 300
while len(list(folder.parent.glob("*/began"))) < plan.get("beside", 0) and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(plan["seconds"])
(folder / "ended").write_text(str(time.time()))
print(plan.get("says", ""))
if plan.get("kill"):
    os.kill(os.getpid(), plan["kill"])
if not plan.get("code"):
    (folder / "result.json").write_text("{}")
sys.exit(plan.get("code", 0))
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """`grid({"name": {"seconds": …, "code": …}})`: runs whose processes only wait and exit with a code."""

    def make(plans):
        (tmp_path / "plan.json").write_text(json.dumps(plans))
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable} -S\n" + CHILD.replace("PLAN", repr(str(tmp_path / "plan.json"))))
        script.chmod(0o755)
        monkeypatch.setattr(local.sys, "executable", str(script))
        monkeypatch.setattr(local, "can_fork", lambda *_: False)
        monkeypatch.setattr(queue, "POLL_SECONDS", 0.01)
        config = copying(tmp_path / "none")[0].config
        for name in plans:
            (tmp_path / name).mkdir()
        return [PlannedRun(name, tmp_path / name, config) for name in plans]

    return make


def spans(runs):
    """How many ran at a time: at most, when one of them began."""
    times = [[float((run.folder / name).read_text()) for name in ("began", "ended")] for run in runs]
    return max(sum(began <= moment < ended for began, ended in times) for moment, _ in times)


@pytest.mark.every(2)
@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_jobs_run_at_a_time(grid, jobs, tmp_path):
    hidden = []  # beside the runs: another command's report would name it as no run
    runs = grid({f"run{i}": {"seconds": 0.05, "beside": jobs} for i in range(jobs + 2)})  # each waits for that many
    done = run_grid(runs, jobs, lambda grid: hidden.extend(tmp_path.glob(".*")))
    assert [progress.state for progress in done] == ["finished"] * len(runs)
    assert hidden == []
    assert spans(runs) == jobs
    assert json.loads((runs[0].folder / "env").read_text())[0] == "1"


def test_a_failing_run_is_reported_and_the_others_finish(grid, monkeypatch):
    monkeypatch.setattr(local, "gpus", lambda: ["5", "7"])
    runs = grid(
        {
            "fine": {"seconds": 0.05},
            "fails": {"seconds": 0, "code": 1, "says": "first\ncanonlm: the disk is full"},
            "killed": {"seconds": 0, "kill": signal.SIGKILL, "says": "step 3"},
            "mute": {"seconds": 0, "code": 3},
            "refused": {"seconds": 0, "code": 2, "says": "canonlm: not here\nanother process: step 4"},
            "later": {"seconds": 0.05},
            "elsewhere": {"seconds": 0},
        }
    )
    (runs[0].folder / "result.json").touch()
    grids = run_grid(runs, 2, lambda grid: (runs[-1].folder / "result.json").touch())  # by another command
    done = {progress.run.name: progress for progress in grids}
    assert [progress.state for progress in grids] == ["finished", *["failed"] * 4, "finished", "finished"]
    assert not (runs[-1].folder / "began").exists()
    assert done["refused"].message.startswith("not here (whole log: ")
    assert not (runs[0].folder / "began").exists(), "a finished run is not started"
    log = runs[1].folder / "log.txt"
    assert done["fails"].message == f"the disk is full (whole log: {log})"
    assert done["killed"].message.startswith("killed by SIGKILL (whole log: ")
    assert done["mute"].message.startswith("no message (whole log: ")
    devices = {json.loads((run.folder / "env").read_text())[1] for run in runs[1:-1]}
    assert devices == {"5", "7"}
    [again] = run_grid(runs[1:2], 1, lambda grid: None)  # by the next command
    assert (again.state, log.read_text().count("the disk is full")) == ("failed", 2)


def when_begun(runs, *numbers):
    """When these runs have begun, send this process the signals, one after the other."""

    def act():
        while not all((run.folder / "began").exists() for run in runs):
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=act).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_reaches_every_process_and_waits(grid, number):
    runs = grid({f"run{i}": {"seconds": 600, "frozen": i == 1} for i in range(3)})
    before = signal.getsignal(number)
    when_begun(runs[:2], number)
    with pytest.raises(KeyboardInterrupt):
        run_grid(runs, 2, lambda grid: None)
    assert [(run.folder / "saved").exists() for run in runs] == [True, True, False]
    assert not (runs[2].folder / "began").exists()
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait(grid):
    runs = grid({"run": {"seconds": 600, "saves": 600}})
    when_begun(runs, signal.SIGINT, signal.SIGINT)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_grid(runs, 1, lambda grid: None)
    assert time.monotonic() - begin < 300
    assert not (runs[0].folder / "saved").exists()
    (runs[0].folder / "began").unlink()  # the process ends


def test_an_internal_error_leaves_no_process_behind(grid):
    runs = grid({"run": {"seconds": 60}})

    def show(grid):
        while grid[0].state == "running" and not (runs[0].folder / "began").exists():
            time.sleep(0.01)
        if grid[0].state == "running":
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        run_grid(runs, 1, show)
    assert (runs[0].folder / "saved").exists()


def test_progress_follows_a_file_that_a_resume_truncates(tmp_path):
    def row(step, kind="train"):
        slices = [{"slice": {"first": 1}, "correct": 3, "total": 4}]
        row = {"kind": kind, "step": step, "loss": step / 10, "tokens_per_s": 36.0, "slices": slices}
        return json.dumps(row) + "\n"

    path = tmp_path / "metrics.jsonl"
    progress = Progress(PlannedRun("run", tmp_path, copying(tmp_path / "none")[0].config))
    assert not progress.read()
    path.write_text(row(10) + row(20) + row(20, "eval") + row(30)[:9])
    assert progress.read()
    assert (progress.step, progress.train.step, progress.evaluation.step) == (20, 20, 20)
    assert not progress.read()
    with path.open("a") as file:
        file.write(row(30)[9:] + "damaged\n[]\n" + row(40))
    assert progress.read()
    assert progress.step == 40
    assert progress.time_left == (1000 - 40) * 4 * 18 / 36
    (tmp_path / "cut").write_text(row(10) + row(20) + row(200) * 20)  # already longer than what was read before
    (tmp_path / "cut").replace(path)
    assert progress.read()
    assert progress.step == 200


@pytest.mark.parametrize(
    ("visible", "count", "found"),
    [(None, 2, ["0", "1"]), ("", 0, []), ("-1", 0, []), ("3,5", 2, ["3", "5"]), ("3,-1,5", 1, ["3"])],
)
def test_gpus_that_cuda_sees(monkeypatch, visible, count, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local.gpus() == found


def test_default_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(local.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(local, "gpus", list)

    def jobs(*overrides):
        return default_jobs(copying(tmp_path, overrides=[*SMALL, *overrides]))

    assert jobs() == 8
    assert jobs("train.num_threads=3") == 2
    assert jobs("train.num_threads=16") == 1
    assert jobs("train.num_threads=null") == 1
    monkeypatch.setattr(local, "gpus", lambda: ["0", "1", "2"])
    assert jobs() == 3
    assert jobs("train.device=cpu") == 8

"""`canonlm data prepare` and `canonlm data check`: their output, its stream, and the exit code."""

import json

import pytest

from canonlm.cli import main, status
from canonlm.data import pipeline
from canonlm.data.prepare import Progress


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "abc", "id": number}) + "\n" for number in range(9)))
    return tmp_path


def canonlm(*args):
    return main(["data", *args])


def prepare(*args, out="out", tokenizer="bytes"):
    return canonlm("prepare", out, "--input", "a.jsonl", "--tokenizer", tokenizer, "--workers", "1", *args)


def test_prints_only_what_it_made(capfd):
    for _ in range(2):  # the second time it is already there
        assert prepare() == 0
        printed = capfd.readouterr()
        assert printed.out.splitlines() == [
            "out: train: 9 documents, 27 bytes of text, 45 tokens",
            "out: vocabulary of 258, uint16",
        ]
        assert printed.err == ""  # nor datatrove's log


def test_check_reads_everything_again(capsys, workdir):
    assert prepare() == 0
    assert canonlm("check", "out") == 0
    assert capsys.readouterr().out.endswith("every file is as it was written\n")
    shard = workdir / "out" / "train-00000.ds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    assert canonlm("check", "out") == 2
    error = "canonlm: out/train-00000.ds: damaged: its sha256 is not the one in index.json\n"
    assert capsys.readouterr().err == error


def test_bad_lines_are_one_line(capfd, workdir):
    with (workdir / "a.jsonl").open("a") as file:
        file.write('{"text": 7}\n')
    assert prepare() == 2
    error = (
        "canonlm: --max-bad: 1 bad lines, more than 0; the first: a.jsonl, line 10: "
        '"text" is not a string but a number. '
        "All are in out/bad-lines.jsonl; the same command with a larger --max-bad continues\n"
    )
    assert capfd.readouterr().err == error
    assert prepare("--max-bad", "1") == 0
    assert "1 bad lines, in bad-lines.jsonl" in capfd.readouterr().out


def test_options_reach_the_shards(workdir):
    assert prepare("--no-bos", "--validation", "0.5", "--seed", "4", "--tasks", "2", "--text-key", "text") == 0
    described = json.loads((workdir / "out" / "index.json").read_text())
    assert (described["bos_id"], described["eos_id"]) == (None, 257)
    assert described["command"]["tasks"] == 2
    assert sum(shard["tokens"] for shards in described["splits"].values() for shard in shards) == 9 * 4


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.0)
    with status.Reading() as bar:
        bar(Progress(read=5_000_000, total=20_000_000, documents=1200, tokens=3_000_000))
    assert capsys.readouterr().err == "5 of 20 MB, 1,200 documents, 3,000,000 tokens\n"


def test_an_interrupted_command_resumes(workdir, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "file_sha256", interrupt)
        assert prepare() == 130
    assert capsys.readouterr().err == "canonlm: interrupted; the same command continues\n"
    assert not list(workdir.glob("out/*.ds*"))
    assert prepare() == 0

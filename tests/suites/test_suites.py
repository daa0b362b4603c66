"""From `key=value` to settings; what a suite stores when it is stopped, and when it runs again."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.report.evals import SUITES
from canonlm.suites import run as suites
from canonlm.suites.generation import Writer
from canonlm.suites.load_model import open_model
from canonlm.suites.multihop import MultiHop
from canonlm.suites.run import PromptOptions, plan, run


class Log:
    def __init__(self):
        self.events = []

    def begin(self, name, questions):
        self.events.append(("begin", name, questions))

    def advance(self, answered):
        pass

    def end(self, entry, again):
        self.events.append(("again" if again else "end", entry["name"]))


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = CanonLMConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=1024
    )
    CanonLMForCausalLM(config).save_pretrained(folder)
    return open_model(str(folder), tokenizer="bytes", device="cpu")


def test_lists_expand_to_every_combination():
    result = plan("multihop", ["k=[1,2]", "background=[0,300]", "people=3", "n=4"])
    expected = [(k, background, 3, 4) for k in (1, 2) for background in (0, 300)]
    assert [(s.k, s.background, s.people, s.n) for s in result] == expected
    assert len(plan("multihop", [])) == 1
    assert [s.task for s in plan("babilong", ["task=[qa1,qa3]"])] == ["qa1", "qa3"]
    (playground,) = plan("playground", ["lengths=[1,1.5]", "task.N=40"])  # a setting that is a list is not a grid
    assert playground.lengths == [1, 1.5]
    assert playground.task == {"N": 40}


@pytest.mark.parametrize(
    ("suite", "pairs", "message"),
    [
        ("multihops", [], 'unknown suite "multihops". Did you mean "multihop"?'),
        ("multihop", ["hops=2"], 'unknown setting "hops"'),
        ("multihop", ["k=0"], "k: expected an integer > 0, got 0"),
        ("multihop", ["k=[]"], r"k: expected at least one value, got \[\]"),
        ("multihop", ["k=[1,0]"], "k: expected an integer > 0, got 0"),
        ("multihop", ["k"], "setting: expected key=value, such as n=100"),
        ("babilong", ["task=qa9"], "qa9"),
        ("playground", ["lengths=[]"], "lengths: expected at least 1"),
    ],
)
def test_mistakes(suite, pairs, message):
    with pytest.raises(ValueError, match=message):
        plan(suite, pairs)


def test_one_file_of_results(subject, tmp_path):
    planned, log = plan("multihop", ["people=[2,3]", "n=3"]), Log()
    entries = run("multihop", planned[:1], subject, PromptOptions(), tmp_path, log)
    entries += run("multihop", planned[1:], subject, PromptOptions(), tmp_path, log)
    assert log.events == [("begin", "1hop-0k", 3), ("end", "1hop-0k")] * 2
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["results"] == entries
    assert result["model"]["fingerprint"] == subject.about["fingerprint"]
    assert [entry["settings"]["people"] for entry in entries] == [2, 3]
    rows = [json.loads(line) for path in (tmp_path / "answers").iterdir() for line in path.read_text().splitlines()]
    assert len(rows) == 6
    before = (tmp_path / "results.json").stat().st_mtime_ns
    log = Log()
    assert run("multihop", planned, subject, PromptOptions(), tmp_path, log) == entries
    assert [kind for kind, *_ in log.events] == ["again"] * 2
    assert (tmp_path / "results.json").stat().st_mtime_ns == before


def test_results_before_a_mistake_are_kept(subject, tmp_path):
    planned = plan("multihop", ["background=[0,2000]", "people=2", "n=2"])  # the context is 1,024 tokens
    with pytest.raises(ValueError, match=r"1hop-2k: prompt 0: .* tokens.* context of 1,024"):
        run("multihop", planned, subject, PromptOptions(), tmp_path, Log())
    assert [entry["name"] for entry in json.loads((tmp_path / "results.json").read_text())["results"]] == ["1hop-0k"]
    entries = run("multihop", planned, subject, PromptOptions(beyond=True), tmp_path, Log())
    assert [entry["name"] for entry in entries] == ["1hop-0k", "1hop-2k"]


def test_an_oracle_is_right(subject, tmp_path, monkeypatch):
    """The scores in the file are those of the stored answers."""

    class Oracle:
        tokens, not_finite = staticmethod(len), ()

        def __init__(self, *_, **__):
            pass

        def write(self, prompts, max_new_tokens, stop):
            (settings,) = plan("multihop", ["people=3", "n=8"])
            questions = MultiHop(settings, len)
            for place, _ in enumerate(prompts):
                yield place, f" {questions[place].answer}" if place < 6 else " no idea"

    monkeypatch.setattr("canonlm.suites.generation.Writer", Oracle)
    (entry,) = run("multihop", plan("multihop", ["people=3", "n=8"]), subject, PromptOptions(), tmp_path, Log())
    assert [(s["measure"], s["value"], s["n"]) for s in entry["scores"] if not s["slice"]] == [
        ("exact", 0.75, 8),
        ("year", 0.75, 8),
    ]


def test_a_model_without_a_tokenizer(subject, tmp_path):
    with pytest.raises(ValueError, match=r"MODEL: expected a model with a tokenizer \(--tokenizer names one: "):
        run("multihop", plan("multihop", []), replace(subject, tokenizer=None), PromptOptions(), tmp_path, Log())
    assert not list(Path(tmp_path).iterdir())


def test_every_suite_is_described():
    assert SUITES.keys() == suites.SUITES.keys()


def test_a_task_file_of_yours_is_known_by_all_that_it_names(tmp_path, monkeypatch):
    """Its data, its code, and what it includes; as for a folder of task files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    files = {name: tmp_path / name for name in ("tasks/a.yaml", "tasks/base.yaml", "tasks/code.py", "data.jsonl")}
    for file in files.values():
        file.write_text("x")
    files["tasks/a.yaml"].write_text(
        "include: base.yaml\ndata_files: {test: data.jsonl}\ndoc_to_text: !function code.of\n"
    )

    def digests(**settings):
        return suites._contents(SimpleNamespace(**settings), settings)

    before, folder = digests(tasks=["piqa", "tasks/a.yaml"]), digests(include="tasks")
    assert list(before) == ["tasks_sha256"]
    for file in files.values():
        content = file.read_text()
        file.write_text(f"{content} ")
        assert digests(tasks=["piqa", "tasks/a.yaml"]) != before
        assert digests(include="tasks") != folder
        file.write_text(content)
    assert digests(tasks=["tasks/a.yaml"]) == before
    assert digests(tasks=["piqa", "tasks", "mmlu_*"]) == digests(include="") == {}


def test_the_name_of_a_special_token_in_a_text_of_yours_is_text(subject, tmp_path, monkeypatch):
    """As in training. It would be token 256 of this tokenizer."""
    seen = []

    def written(self, prompts, order, max_new_tokens, stop):
        seen.extend(prompts)
        return ((index, "") for index in order)

    monkeypatch.setattr(Writer, "_write", written)
    (tmp_path / "my.txt").write_text("A ferry <bos> left. " * 90)
    planned = plan("multihop", ["people=2", "n=2", "background=90", f"text={tmp_path / 'my.txt'}"])
    run("multihop", planned, subject, PromptOptions(), tmp_path / "out", Log())
    assert len(seen) == 2
    for prompt in seen:
        assert max(prompt) < 256
        assert b"<bos>" in bytes(prompt)

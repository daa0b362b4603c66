"""Tasks of the lm-evaluation-harness end to end, without a network: definitions of real tasks on small local data; our
groups, suites and command line in it."""

import copy
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import SENTENCES, make_decoder, make_tokenizer
from typer.testing import CliRunner

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from canonlm.cli import app, main
from canonlm.suites.harness import TASKS, run
from canonlm.suites.harness.lm import CanonLM
from canonlm.suites.harness.run import HarnessSettings, run_harness
from canonlm.suites.load_model import Subject, open_model
from canonlm.suites.questions import Score

pytestmark = pytest.mark.usefixtures("_local_tasks_only")
STOCK = Path(lm_eval.tasks.__file__).parent
PIQA = [
    {"goal": goal, "sol1": first, "sol2": second, "label": label}
    for goal, first, second, label in [
        ("To dry a coat,", "hang it by the stove.", "put it in the pond.", 0),
        ("To find a letter,", "close the drawer.", "open the drawer.", 1),
        ("To keep bread fresh,", "leave it in the rain.", "wrap it in a cloth.", 1),
        ("To see at night,", "light a lamp.", "cover a lamp.", 0),
        ("To cross the harbour,", "take the ferry.", "follow a gull.", 0),
    ]
]
ARC = [
    {"id": str(number), "question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}
    for number, (question, texts, labels, answer) in enumerate(
        [
            ("What falls in winter?", ["snow", "bread", "gulls", "lamps"], ["A", "B", "C", "D"], "A"),
            ("Where do trees grow?", ["drawer", "orchard", "ferry"], ["1", "2", "3"], "2"),
        ]
    )
]
WIKITEXT = [
    {"page": f" = Page {number} = \n\n {' '.join(SENTENCES[number:] + SENTENCES[:number])} \n"} for number in range(4)
]
QUESTIONS = ["Who leaves before seven", "What is sold across the street", "Which lamp is brighter", "What fell"]


def write_task(folder, name, stock, splits, rows, cache, **more):
    """The harness's own definition of a task, on data of ours."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict.fromkeys(splits, str(folder / f"{name}.jsonl"))
    task = {
        "include": str(STOCK / stock),
        "task": name,
        "tag": "local_tag" if name in ("local_arc", "local_wikitext") else None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | more))  # JSON is YAML


@pytest.fixture(scope="module")
def subjects(llama):
    return {
        "a Llama of transformers": open_model(llama, device="cpu"),
        "a random model of ours": Subject(make_decoder("gdn2+canon"), make_tokenizer(), {"source": "random"}),
    }


SHORT = {"until": ["\n", ".", ","], "max_gen_toks": 20}  # the tiny models read 48 tokens


def first_words(subject):
    """A model's answers to the first two questions, in the harness's format of TriviaQA."""
    prompts = [f"Question: {question}?\nAnswer:" for question in QUESTIONS[:2]]
    requests = [Instance("generate_until", {}, (prompt, SHORT), i) for i, prompt in enumerate(prompts)]
    return [answer.strip() for answer in CanonLM(subject).generate_until(requests, True)]


@pytest.fixture(scope="module")
def include(tmp_path_factory, subjects):
    folder = tmp_path_factory.mktemp("tasks")
    cache = tmp_path_factory.mktemp("cache")
    answers = zip(*(first_words(subject) for subject in subjects.values()), strict=True)
    trivia = [
        {"question": question, "answer": {"aliases": [*result, "the ferry"]}}
        for question, result in zip(QUESTIONS, [*answers, (), ()], strict=True)
    ]
    two, three = ("train", "validation"), ("train", "validation", "test")
    write_task(folder, "local_piqa", "piqa/piqa.yaml", two, PIQA, cache)
    write_task(folder, "local_arc", "arc/arc_easy.yaml", three, ARC, cache)
    write_task(folder, "local_wikitext", "wikitext/wikitext.yaml", three, WIKITEXT, cache)
    write_task(folder, "local_trivia", "triviaqa/default.yaml", two, trivia, cache, generation_kwargs=SHORT)
    (folder / "local_choice.yaml").write_text(
        "group: local_choice\ntask: [local_piqa, local_arc]\naggregate_metric_list: [{metric: acc}]\n"
    )
    (folder / "local_more.yaml").write_text(
        "group: local_more\ntask: [{task: local_piqa, num_fewshot: 3}, local_arc]\n"
    )
    (folder / "local_fewer.yaml").write_text("group: local_fewer\ntask: [local_piqa]\nnum_fewshot: 0\n")
    (folder / "local_all.yaml").write_text("group: local_all\ntask: [local_choice, local_wikitext, local_trivia]\n")
    return str(folder)


def by_measure(scores, **slice):
    return {score.measure: score for score in scores if score.slice == slice}


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("which", ["a Llama of transformers", "a random model of ours"])
def test_multiple_choice_perplexity_and_generation(subjects, include, which, bos):
    reported = []
    settings = HarnessSettings(tasks=["local_all"], include=include)
    scores = run_harness(subjects[which], settings, lambda *told_now: reported.append(told_now), bos=bos)
    assert reported == list(scores.items())
    assert list(scores) == ["local_choice", "local_wikitext", "local_trivia"]

    lm = CanonLM(subjects[which], bos=bos)
    acc = by_measure(scores["local_choice"], task="local_piqa")["acc"]
    share = sum(piqa_by_hand(lm)) / len(PIQA)
    assert acc.value == pytest.approx(share)
    assert acc.stderr == pytest.approx(math.sqrt(share * (1 - share) / (len(PIQA) - 1)))
    assert (acc.n, acc.higher_is_better, acc.share) == (5, True, True)
    arc = by_measure(scores["local_choice"], task="local_arc")
    assert set(arc) == {"acc", "acc_norm"}
    mean = by_measure(scores["local_choice"])["acc"]
    assert mean == scores["local_choice"][0]
    assert mean.value == pytest.approx((5 * share + 2 * arc["acc"].value) / 7)
    assert (mean.n, mean.stderr is None) == (7, False)

    texts = wikitext_by_hand(lm)
    perplexity = by_measure(scores["local_wikitext"])["word_perplexity"]
    assert perplexity.value == pytest.approx(math.exp(-sum(x for x, _ in texts) / sum(w for _, w in texts)))
    assert perplexity.stderr == pytest.approx(run._of_texts("word_perplexity", texts))  # checked in the next test
    assert (perplexity.n, perplexity.higher_is_better, perplexity.share) == (4, False, False)

    match = by_measure(scores["local_trivia"])["exact_match"]
    assert (match.n, match.higher_is_better) == (4, True)
    if not bos:
        assert match.value == 0.5
        assert match.stderr == pytest.approx(math.sqrt(0.25 / 3))


def piqa_by_hand(lm):
    for row in PIQA:
        pairs = [(f"Question: {row['goal']}\nAnswer:", f" {row[key]}") for key in ("sol1", "sol2")]
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        first, second = (score for score, _ in lm.loglikelihood(requests, True))
        yield int(second > first) == row["label"]


def wikitext_by_hand(lm):
    pages = map(wikitext_detokenizer, WIKITEXT)
    requests = [Instance("loglikelihood_rolling", {}, (page,), 0) for page in pages]
    words = [len(re.split(r"\s+", row["page"])) for row in WIKITEXT]
    return list(zip(lm.loglikelihood_rolling(requests, True), words, strict=True))


def test_a_standard_error_of_perplexity_covers_what_it_should():
    """For random log-likelihoods, the spread over draws is the standard error that the formula gives for one."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, 200, (60,), generator=generator).double()

    def draw():
        noise = torch.randn(60, generator=generator, dtype=torch.float64)
        return (-3 * words + 4 * words.sqrt() * noise).tolist()

    draws = [list(zip(draw(), words.tolist(), strict=True)) for _ in range(400)]
    values = torch.tensor([math.exp(-sum(x for x, _ in texts) / words.sum()) for texts in draws])
    reported = torch.tensor([run._of_texts("word_perplexity", texts) for texts in draws])
    assert reported.mean().item() == pytest.approx(values.std().item(), rel=0.15)
    bits = [run._of_texts("bits_per_byte", texts) for texts in draws]
    assert (reported / values / math.log(2)).tolist() == pytest.approx(bits)
    assert run._of_texts("word_perplexity", draws[0][:1]) is None
    assert run._of_texts("acc", draws[0]) is None


def test_finished_tasks_are_not_repeated_and_an_interruption_keeps_results(subjects, include):
    settings = HarnessSettings(tasks=["local_all"], include=include, limit=2, num_fewshot=1)
    reported = []

    def stop_at_the_second(name, scores):
        reported.append((name, scores))
        if len(reported) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_harness(subjects["a random model of ours"], settings, stop_at_the_second)
    assert [name for name, _ in reported] == ["local_choice", "local_wikitext"]
    assert by_measure(reported[0][1], task="local_piqa")["acc"].n == 2
    done, reported = dict(reported), []
    rest = run_harness(subjects["a random model of ours"], settings, lambda *now: reported.append(now), done=done)
    assert reported == [("local_choice", []), ("local_wikitext", []), *rest.items()]
    assert list(rest) == ["local_trivia"]
    again = run_harness(subjects["a random model of ours"], settings, done=rest)
    assert again == done


def test_input_too_long_for_the_model_is_reported_once(subjects, include, caplog):
    settings = HarnessSettings(tasks=["local_piqa", "local_trivia"], include=include, num_fewshot=2)
    result = run_harness(subjects["a Llama of transformers"], settings)
    cut = [[score for score in scores if score.measure == "cut"] for scores in result.values()]
    full = {"stderr": None, "n": None, "higher_is_better": False, "share": False}
    assert cut == [[Score("cut", 10, **full)], [Score("cut", 4, **full)]]
    assert all(scores[0].measure != "cut" for scores in result.values())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "local_piqa: 10 texts of more than 48 tokens lost their beginning",
        "local_trivia: 4 texts of more than 48 tokens lost their beginning",
    ]
    # Prompts are read whole if that is requested, or if the model has no limit.
    for which, beyond in (("a Llama of transformers", True), ("a random model of ours", False)):
        result = run_harness(subjects[which], settings, beyond=beyond)
        assert ["cut" in by_measure(scores) for scores in result.values()] == [True, False]


def test_a_question_whose_scores_are_not_finite_is_wrong(subjects, include):
    """The harness takes the first NaN for the model's choice, and three of the five right ones are the first."""
    settings = HarnessSettings(tasks=["local_choice"], include=include)
    healthy = subjects["a Llama of transformers"]
    broken = Subject(copy.deepcopy(healthy.model), healthy.tokenizer, healthy.about)
    with torch.no_grad():
        broken.model.lm_head.weight[5] = torch.nan
    (scores,) = run_harness(broken, settings).values()
    shares = [score for score in scores if score.share]
    assert {score.measure for score in shares} == {"acc", "acc_norm"}
    assert all(score.value == 0 for score in shares)
    assert next(score for score in scores if score.measure == "not_finite").value == len(PIQA) + len(ARC)


def test_names_patterns_and_files_of_tasks(include):
    manager = run.open_tasks(include)

    def resolved(*tasks):
        return run.find(manager, tasks)

    assert resolved("local_piqa", "local_w*") == ["local_piqa", "local_wikitext"]
    assert resolved("local_wikitext", "local_all") == ["local_wikitext", "local_choice", "local_trivia"]
    assert resolved("local_tag") == ["local_arc", "local_wikitext"]
    assert resolved("local_more", "local_fewer") == ["local_more", "local_fewer"]  # they change their tasks' settings
    file = f"{include}/local_arc.yaml"
    assert resolved(file) == [file]
    units = {
        name: [[run.name_of(unit) for unit in run.load(manager, part)] for part in run.parts(manager, name)]
        for name in (file, "local_choice", "local_more")
    }
    assert units == {
        file: [["local_arc"]],
        "local_choice": [["local_choice"]],
        "local_more": [["local_piqa"], ["local_arc"]],
    }
    more = [task for part in run.parts(manager, "local_more") for task in run.load(manager, part)]
    assert [task.get_config("num_fewshot") for task in more] == [3, None]
    [[fewer]] = [run.load(manager, part) for part in run.parts(manager, "local_fewer")]
    assert fewer.get_config("num_fewshot") == 0
    assert [part.names for part in run.parts(manager, "local_more")] == [["local_piqa"], ["local_arc"]]
    full = manager.load(["local_more"])["groups"]["local_more"]
    assert full.child_names == ["local_piqa", "local_arc"]  # the index is as it was


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tasks": ["local_pika"]}, 'unknown task "local_pika". Did you mean "local_piqa"?'),
        ({"tasks": ["xyzzy"]}, 'unknown task "xyzzy". `canonlm lm-eval ls tasks` lists all of them.'),
        ({"tasks": ["local_piqa"], "include": "nowhere"}, "include: expected a folder with YAML files of tasks"),
        ({"tasks": ["gone"]}, "gone: "),
        ({"tasks": ["local_trivia"], "max_length": 15}, "local_trivia: max_length: expected more than the 20 tokens"),
        (
            {"tasks": ["canonlm_1hop_2k"], "max_length": 10},
            "canonlm_1hop_2k: max_length: expected more than the 16 tokens",
        ),
    ],
)
def test_bad_input_is_reported_in_one_line(subjects, include, settings, complaint, monkeypatch):
    gone = {"task": "gone", "dataset_path": "json", "dataset_kwargs": {"data_files": "/nowhere/gone.jsonl"}}
    Path(include, "gone.yaml").write_text(json.dumps({**gone, "test_split": "train"}))
    settings = HarnessSettings(**{"include": include, "limit": 1, "metadata": {"n": 1}, **settings})
    with pytest.raises(ValueError, match=rf"\A{re.escape(complaint)}.*\Z"):
        run_harness(subjects["a random model of ours"], settings)


UNREACHABLE = "Couldn't reach '{}' on the Hub (OfflineModeIsEnabled)"
ERRORS = {
    "someone/far": (ConnectionError, UNREACHABLE.format("someone/far")),
    "someone/farther": (ConnectionError, UNREACHABLE.format("someone/farther")),
    "script": (RuntimeError, "Dataset scripts are no longer supported, but found script.py"),
    "punkt": (LookupError, "\n*****\n  Resource \x1b[93mpunkt_tab\x1b[0m not found.\n*****\n"),
    "disk": (OSError, "[Errno 5] Input/output error"),
    "broken": (datasets.exceptions.DatasetsError, "no such split"),
}


def test_a_failing_task_does_not_stop_the_others(subjects, include, tmp_path, monkeypatch, caplog):
    real = datasets.load_dataset

    def load_dataset(path, *args, **kwargs):
        if path in ERRORS:
            error, message = ERRORS[path]
            raise error(message)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = [path.removeprefix("someone/") for path in ERRORS]
    for name, path in zip(names, ERRORS, strict=True):
        Path(include, f"{name}.yaml").write_text(json.dumps({"task": name, "dataset_path": path}))
    Path(include, "mixed.yaml").write_text(json.dumps({"group": "mixed", "task": ["far", "local_piqa", "farther"]}))
    long = {"task": "long", "include": f"{include}/local_trivia.yaml", "generation_kwargs": {"max_gen_toks": 99}}
    Path(include, "long.yaml").write_text(json.dumps(long))
    reported = []
    with pytest.raises(ValueError) as error:
        run_harness(
            subjects["a Llama of transformers"],
            HarnessSettings(tasks=["mixed", *names[2:], "long", "local_arc"], include=include),
            lambda name, scores: reported.append((name, len(scores))),
        )
    assert reported == [("local_piqa", 2), ("local_arc", 2)]
    assert str(error.value).endswith("; also not evaluated: farther, script, punkt, disk, broken, long")
    message = [
        record.getMessage().removeprefix("left out: ") for record in caplog.records if "left out" in record.message
    ]
    far = r"far: its data .*someone/far.*canonlm lm-eval --model dummy --tasks far .*HF_HOME"
    assert re.match(far, str(error.value))
    assert re.match(far, message[0])
    assert message[1].startswith("farther: its data")
    assert message[2:6] == [
        "script: Dataset scripts are no longer supported, but found script.py (RuntimeError)",
        "punkt: Resource punkt_tab not found. (LookupError)",
        "disk: [Errno 5] Input/output error (OSError)",
        "broken: no such split (DatasetsError)",
    ]
    assert message[6].startswith("long: max_length: expected more than the 99 tokens")


def test_remaining_tasks_of_a_group_are_opened_one_at_a_time(subjects, include, monkeypatch):
    happened = []
    real = run.load
    monkeypatch.setattr(run, "load", lambda manager, part: happened.append(f"open {part.names}") or real(manager, part))
    subject, reported = subjects["a random model of ours"], []
    settings = HarnessSettings(tasks=["local_more"], include=include)
    with pytest.raises(ValueError, match="unknown task"):
        run_harness(subject, HarnessSettings(tasks=["local_more", "local_pika"], include=include))
    assert happened == []
    first = run_harness(subject, settings, lambda name, _: happened.append(f"asked {name}"))
    assert happened == ["open ['local_piqa']", "asked local_piqa", "open ['local_arc']", "asked local_arc"]
    happened.clear()
    rest = run_harness(subject, settings, lambda name, scores: reported.append((name, scores)), done=["local_piqa"])
    assert happened == ["open ['local_arc']"]
    assert rest == {"local_arc": first["local_arc"]}
    assert reported == [("local_piqa", []), *rest.items()]
    happened.clear()
    assert run_harness(subject, settings, done=first) == {}
    assert happened == []


def test_the_name_of_a_measure_decides_its_unit():
    def shares(task, **numbers):
        results = {task: {f"{measure},none": value for measure, value in numbers.items()}}
        return {score.measure: score.share for score in run._scores({"results": results, "higher_is_better": {}}, task)}

    assert shares("a", acc=0.0, mcc=0.5, bleu=0.9, word_perplexity=0.7, **{"512": 1.0, "2048": -1}) == {
        **{"acc": True, "mcc": False, "bleu": False, "word_perplexity": False},
        "512": True,  # a length without questions has no score
    }
    assert shares("squadv2", exact=0.8, f1=61.0) == {"exact": False, "f1": False}


def test_without_the_harness_the_install_command_is_shown(subjects, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'canonlm\[eval\]'"):
        run_harness(subjects["a random model of ours"], HarnessSettings(tasks=["piqa"]))


def test_the_evaluation_command_saves_the_harness_results(llama, include, subjects, tmp_path, capsys):
    def say(tasks, *more):
        command = ["eval", str(llama), f"include={include}", "--suite", "harness", "--trust", "--tasks", tasks]
        code = main([*command, "--out", str(tmp_path), *more])
        return code, capsys.readouterr()

    code, output = say("local_piqa")
    assert (code, output.out.splitlines()[-1]) == (0, f"results: {tmp_path / 'results.json'}")
    assert output.out.startswith("local_piqa  acc ")
    code, output = say("local_piqa,local_wikitext")
    assert code == 0
    first, second, _ = output.out.splitlines()
    assert first.endswith("(as before)")
    assert second.startswith("local_wikitext  word_perplexity ")
    assert "%" not in second
    own, data = tmp_path / "mine.yaml", tmp_path / "mine.jsonl"
    data.write_text((Path(include) / "local_piqa.jsonl").read_text())
    text = (Path(include) / "local_piqa.yaml").read_text().replace(f"{include}/local_piqa.jsonl", str(data))
    own.write_text(text.replace("local_piqa", "mine"))
    shown = []
    for change in (lambda: None, lambda: None, lambda: data.write_text(data.read_text() * 2)):
        change()
        code, output = say(f"local_wikitext,{own}")
        assert code == 0
        shown.append([line.split()[0] + line.partition("(as before)")[1] for line in output.out.splitlines()[:-1]])
    before = "local_wikitext(as before)"
    assert shown == [[before, "mine"], [before, "mine(as before)"], [before, "mine"]]
    code, output = say("local_piqaa")
    assert code == 2
    assert output.err.startswith('canonlm: unknown task "local_piqaa". Did you mean "local_piqa"?')
    piqa, wikitext, *mine = json.loads((tmp_path / "results.json").read_text())["results"]
    assert ["tasks_sha256" in entry["settings"] for entry in (piqa, wikitext, *mine)] == [False, False, True, True]
    assert (piqa["suite"], piqa["name"], wikitext["name"]) == ("harness", "local_piqa", "local_wikitext")
    model = subjects["a Llama of transformers"]
    expected = run_harness(model, HarnessSettings(tasks=["local_piqa"], include=include))["local_piqa"]
    assert [(s["measure"], s["value"], s["stderr"]) for s in piqa["scores"]] == [
        (score.measure, score.value, score.stderr) for score in expected
    ]


def canonlm_lm_eval(*arguments):
    return CliRunner().invoke(app, ["lm-eval", *arguments])


def saved_results(folder):
    [file] = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


@pytest.mark.slow
def test_the_harness_command_line_lists_our_models_and_tasks(llama, include, subjects, tmp_path):
    arguments = ["--tasks", "local_piqa,local_wikitext,local_trivia,canonlm_1hop_0k", "--include_path", include]
    arguments += ["--device", "cpu", "--batch_size", "7", "--metadata", "n=3"]
    for model, further in (("canonlm", ""), ("hf", ",dtype=float32,add_bos_token=False")):
        model_args = ["--model", model, "--model_args", f"pretrained={llama}{further}"]
        output = canonlm_lm_eval(*model_args, *arguments, "--output_path", str(tmp_path / model))
        assert output.exception is None, output.output
        assert "local_wikitext" in output.output
    ours, theirs = (saved_results(tmp_path / model) for model in ("canonlm", "hf"))
    assert set(ours) == {"local_piqa", "local_wikitext", "local_trivia", "canonlm_1hop_0k"}
    for task, numbers in ours.items():
        for key, number in numbers.items():
            expected = pytest.approx(theirs[task][key], rel=1e-4) if isinstance(number, float) else theirs[task][key]
            assert number == expected, (task, key)
    settings = HarnessSettings(tasks=["local_piqa", "local_wikitext"], include=include)
    for name, scores in run_harness(subjects["a Llama of transformers"], settings).items():
        for score in scores:
            assert ours[name][f"{score.measure},none"] == pytest.approx(score.value, rel=1e-4)


def test_mistakes_on_the_command_line(include, llama, tmp_path):
    argv = sys.argv
    model = ["--model", "canonlm", "--model_args", f"pretrained={llama}"]
    output = canonlm_lm_eval(*model, "--tasks", "local_pika", "--include_path", include)
    assert isinstance(output.exception, ValueError)
    assert str(output.exception).startswith('unknown task "local_pika". Did you mean "local_piqa"?')
    assert canonlm_lm_eval("run", "--no_such_option").exit_code == 2
    output = canonlm_lm_eval(
        "--model", "canonlm", "--model_args", "pretrained=/nowhere/here", "--tasks", "canonlm_1hop_0k"
    )
    assert isinstance(output.exception, ValueError)
    assert "/nowhere/here" in str(output.exception)
    assert sys.argv is argv
    config = tmp_path / "settings.yaml"
    model = {"model": "canonlm", "model_args": {"pretrained": llama}, "device": "cpu"}
    config.write_text(json.dumps({**model, "tasks": ["local_piqa"], "include_path": include, "limit": 2}))
    assert canonlm_lm_eval("--config", str(config)).exception is None


def test_the_command_line_explains_itself():
    output = canonlm_lm_eval("--help")
    assert output.exit_code == 0
    assert "canonlm lm-eval run -h" in " ".join(output.output.split())
    theirs = canonlm_lm_eval("run", "-h")
    assert theirs.exit_code == 0
    assert "--num_fewshot" in theirs.output
    assert canonlm_lm_eval("--tasks-folder").output.strip() == str(TASKS)

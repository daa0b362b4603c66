"""Our groups of the lm-evaluation-harness's tasks, and our own suites as tasks of it."""

import math
from pathlib import Path

import pytest
from tiny_models import make_tokenizer

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from canonlm.suites.babilong import Babilong, BabilongSettings
from canonlm.suites.babilong import published_settings as babilong_settings
from canonlm.suites.harness import TASKS, opening, run
from canonlm.suites.harness.questions import grade_needle
from canonlm.suites.harness.run import PUBLISHED
from canonlm.suites.multihop import MultiHop, MultiHopSettings
from canonlm.suites.multihop import published_settings as multihop_settings

STOCK = Path(lm_eval.tasks.__file__).parent

TASKS_OF_COLUMNS = [  # LMB, PIQA, …, niah-S3: the 29 columns of the published results, in their order
    *("lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "copa"),
    *("openbookqa", "race", "commonsense_qa", "mmlu", "wikitext", "fda", "canonlm_fda_twice", "swde"),
    *("canonlm_swde_twice", "nq_open", "canonlm_nq_open_twice", "squad_completion", "canonlm_squad_twice"),
    *("triviaqa", "canonlm_triviaqa_twice", "drop", "canonlm_drop_twice"),
    *("niah_single_1", "niah_single_2", "niah_single_3"),
]


@pytest.fixture(scope="module")
def manager():
    """The harness's tasks that our groups name, and ours."""
    folders = (
        "lambada piqa hellaswag winogrande arc siqa super_glue openbookqa race commonsense_qa mmlu/default wikitext"
    )
    folders += " fda swde nq_open squad_completion triviaqa drop ruler"
    paths = [TASKS, *(STOCK / name for name in folders.split())]
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=paths)


def members(manager, name):
    config = manager.task_index[name].cfg
    return [member if isinstance(member, str) else member["task"] for member in config["task"]]


def test_groups_hold_a_task_of_the_harness_for_each_published_column(manager):
    grouped = [task for group in PUBLISHED for task in members(manager, group)]
    assert sorted(grouped) == sorted(TASKS_OF_COLUMNS)
    assert set(grouped) <= set(manager.all_tasks)
    result = run.find(manager, PUBLISHED)
    assert result == [*grouped[:-3], "canonlm_needle"]  # which changes its tasks' lengths, and is opened as a whole


def test_needles_are_opened_one_by_one_as_the_group_says(manager):
    parts, entry = run.parts(manager, "canonlm_needle"), manager.task_index["canonlm_needle"]
    assert [part.names for part in parts] == [["niah_single_1"], ["niah_single_2"], ["niah_single_3"]]
    for part in parts:
        with opening._alone(manager, part):
            config = manager.task_index["canonlm_needle"].cfg
            [member] = config["task"]
            assert (config["group"], [member["task"]]) == ("canonlm_needle", part.names)
            assert member["process_results"] is grade_needle
            lengths = member["metadata"]["max_seq_lengths"]
            assert lengths == [512, 2048, 4096, 5120, 6144, 7168, 8192]
            assert [metric["metric"] for metric in member["metric_list"]] == list(map(str, lengths))
        assert manager.task_index["canonlm_needle"] is entry
    [mmlu] = run.parts(manager, "mmlu")  # which has a mean
    assert (mmlu.member, mmlu.names) == (None, ["mmlu"])


def test_our_suites_have_a_task_for_each_published_setting(manager):
    names = {s.name.replace("-", "_"): s for s in (*multihop_settings(), *babilong_settings())}
    names = {f"canonlm_{name}": settings for name, settings in names.items()}
    assert members(manager, "canonlm_multihop") + members(manager, "canonlm_babilong") == list(names)
    assert len(names) == 16 + 20
    for name, settings in names.items():
        config = manager.task_index[name].cfg["metadata"]
        assert {key: getattr(settings, key) for key in config} == config
        # A setting that a task's YAML omits is the suite's default, not the published value.
        mine = type(settings)(**config)
        unsaid = {"published": False} if "hop" in name else {"facts": "simulator", "text": None, "n": 500}
        assert mine.model_dump() == {**settings.model_dump(), **unsaid}


def test_finds_all_our_yaml_files(manager):
    assert sorted(file.stem for file in TASKS.rglob("*.yaml")) == sorted(n for n in manager.all_tasks if "canonlm" in n)


class Oracle(LM):
    """Knows the answers to some prompts, and gives empty answers to others."""

    tokenizer_name = "oracle"

    def __init__(self, answers):
        super().__init__()
        self.answers, self.requests = answers, []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests += [request.args for request in requests]
        return [self.answers.get(request.args[0], "") for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.usefixtures("_local_tasks_only")
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("canonlm_1hop_0.5k", MultiHopSettings(background=500, n=6, seed=3)),
        ("canonlm_2hop_1k", MultiHopSettings(k=2, people=3, background=1000, n=6, seed=3)),
        ("canonlm_babilong_qa2_1k", BabilongSettings(task="qa2", length=1000, n=6, seed=3)),
    ],
)
def test_our_suites_are_tasks_for_any_model_of_the_harness(tmp_path, task, settings):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)

    def tokens(text):
        return len(tokenizer.encode(text, add_special_tokens=False))

    suite = MultiHop(settings, tokens) if isinstance(settings, MultiHopSettings) else Babilong(settings, tokens)
    questions = [suite[index] for index in range(6)]
    oracle = Oracle({question.prompt: f" {question.answer}" for question in questions[:4]})
    manager = run.open_tasks(metadata={"pretrained": str(tmp_path), "n": 6, "seed": 3})
    reported = evaluate(oracle, manager.load([task]), bootstrap_iters=10)
    assert [prompt for prompt, _ in oracle.requests] == [question.prompt for question in questions]
    stop = oracle.requests[0][1]
    assert (stop["until"], stop["max_gen_toks"]) == (list(suite.stop), suite.max_new_tokens)
    for measure in suite.measures:
        assert reported["results"][task][f"{measure},none"] == pytest.approx(4 / 6)
        assert reported["results"][task][f"{measure}_stderr,none"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 5))
        assert reported["higher_is_better"][task][measure] is True


@pytest.mark.usefixtures("_local_tasks_only")
def test_lengths_need_a_tokenizer_and_no_length_needs_none(tmp_path):
    run.open_tasks(metadata={"n": 1}).load(["canonlm_1hop_0k"])
    for metadata in ({"n": 1}, {"n": 1, "tokenizer": str(tmp_path)}):
        with pytest.raises(ValueError, match="--metadata: expected a tokenizer to measure lengths by"):
            run.open_tasks(metadata=metadata).load(["canonlm_1hop_1k"])


@pytest.mark.usefixtures("_local_tasks_only")
@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("fda", {"text": " Name: Ferry\nOwner:", "value": " Ada "}, "Name: Ferry\nOwner:"),
        ("swde", {"text": "<b>Owner</b>: ", "value": "Ada"}, "<b>Owner</b>:"),
        ("squad", {"text": "Ada owns the ferry. Its owner is", "value": "Ada"}, "Ada owns the ferry. Its owner is"),
        ("nq_open", {"question": "who owns it", "answer": ["Ada"]}, "Q: who owns it?\nA:"),
        ("triviaqa", {"question": "Who owns it", "answer": {"aliases": ["Ada"]}}, "Question: Who owns it?\nAnswer:"),
        (
            "drop",
            {
                "query_id": "1",
                "passage": "Ada owns the ferry.",
                "question": "Who owns it?",
                "answer": {"number": "", "spans": ["Ada"], "date": {"day": "", "month": "", "year": ""}},
                "validated_answers": {"number": [], "spans": [], "date": []},
            },
            "Ada owns the ferry. Who owns it?",
        ),
    ],
)
def test_duplicate_examples(monkeypatch, task, row, message):
    rows = datasets.Dataset.from_list([row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.DatasetDict(train=rows, validation=rows))
    name = f"canonlm_{task}_twice"
    description = "Answer these questions:\n\n" if task == "nq_open" else ""
    oracle = Oracle({f"{description}{message}\n\n{message}": " Ada"})
    [result] = evaluate(oracle, run._ready(run.open_tasks().load([name]), None))["results"].values()
    assert result["name"] == name
    exact = "exact_match,remove_whitespace"
    assert result[{"nq_open": exact, "triviaqa": exact, "drop": "em,none"}.get(task, "contains,none")] == 1


def test_a_needle_counts_under_its_own_length():
    doc = {"max_length": 5120, "outputs": ["1234567"]}
    assert grade_needle(doc, ["It is 1234567."]) == {"5120": 1.0}
    assert grade_needle(doc, ["It is 7654321."]) == {"5120": 0.0}

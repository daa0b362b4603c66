"""The `setting` of an evaluation in tables and files: equal for equal questions, and different for different ones."""

import itertools

import pytest

from canonlm.experiments.published.names import setting_of_suite

SHA = "60d037f8d0064e310e0cd3cb7329de75f873cfa70bd7b37f2bb0a19dce94d1b5"
MANO = {"name": "mano", "L": 10, "ops": "asm", "modulus": 23, "synonyms": True}
MULTIHOP = {"k": 1, "people": 5, "background": 0, "text": None, "published": False, "n": 500, "seed": 0, "bos": False}
BABILONG = {"task": "qa1", "length": 0, "facts": "simulator", "text": None, "n": 500, "seed": 0, "bos": False}
HARNESS = {"num_fewshot": None, "limit": None, "include": None, "max_length": None, "metadata": {}, "bos": False,
           "beyond": False}  # fmt: skip
PLAYGROUND = {"task": MANO, "seq_len": 64, "n": 500, "seed": 0, "split": "test", "batch_size": 32}
TEXT = {"file": "data/my.jsonl", "text_key": "text", "n": None, "context": 16, "file_sha256": SHA}
HUB = {"facts": "hub", "text": "dataset", "n": 1000}

BEFORE = [  # as earlier versions noted settings and named them
    ("multihop", MULTIHOP, "fair, 5 people"),
    ("multihop", MULTIHOP | {"k": 2, "people": 3, "background": 2000}, "fair, 3 people"),
    ("multihop", MULTIHOP | {"published": True}, None),
    ("multihop", MULTIHOP | {"published": True, "k": 2, "people": 3, "background": 500}, None),
    ("multihop", {"published": True}, None),
    ("multihop", {"published": False}, "fair"),
    ("multihop", {}, None),
    ("babilong", BABILONG, "simulator"),
    ("babilong", BABILONG | {"task": "qa5", "length": 4000}, "simulator"),
    ("babilong", BABILONG | {"facts": "hub"}, "hub"),
    ("babilong", BABILONG | HUB | {"length": 2000}, None),
    ("babilong", {"facts": "hub", "text": "dataset"}, None),
    ("babilong", {}, "simulator"),
    ("harness", HARNESS, None),
    ("harness", {}, None),
    ("harness", HARNESS | {"limit": 20, "bos": True}, "limit=20, bos"),
    ("playground", PLAYGROUND, "mano-10"),
    ("playground", {"task": MANO}, "mano-10"),
    ("mine", {}, None),
]


@pytest.mark.parametrize(("suite", "settings", "setting"), BEFORE)
def test_names_of_default_settings_stay(suite, settings, setting):
    assert setting_of_suite(suite, settings) == setting


NOW = [
    ("multihop", MULTIHOP | {"published": True, "people": 1}, "people=1, published"),
    ("multihop", MULTIHOP | {"published": True, "n": 20}, "published, n=20"),
    ("multihop", MULTIHOP | {"published": True, "k": 2}, "published"),  # the published one has three people
    ("multihop", MULTIHOP | {"n": 20, "seed": 1}, "fair, 5 people, n=20, seed=1"),
    ("multihop", MULTIHOP | {"text": "a/own.txt", "text_sha256": SHA}, "fair, 5 people, text=own.txt 60d037f8"),
    ("babilong", BABILONG | {"seed": 1, "text": "own.txt"}, "simulator, text=own.txt, seed=1"),
    ("babilong", BABILONG | HUB | {"n": 500}, "facts=hub, text=dataset"),
    ("babilong", BABILONG | HUB | {"facts": "/a/copy", "facts_sha256": SHA},
     "facts=copy 60d037f8, text=dataset, n=1000"),
    ("harness", HARNESS | {"include": "a/tasks", "include_sha256": SHA, "metadata": {"n": 1}, "beyond": True},
     'include=tasks 60d037f8, metadata={"n": 1}, beyond'),
    ("playground", PLAYGROUND | {"n": 8, "seed": 3, "split": "train"}, "mano-10, n=8, seed=3, split=train"),
    ("harness", HARNESS | {"tasks_sha256": SHA}, "tasks=60d037f8"),
    ("text", TEXT, "file=my.jsonl 60d037f8, context=16"),
    ("text", TEXT | {"text_key": "body", "n": 3}, "file=my.jsonl 60d037f8, text_key=body, n=3, context=16"),
]  # fmt: skip


@pytest.mark.parametrize(("suite", "settings", "setting"), NOW)
def test_other_settings_are_in_the_name(suite, settings, setting):
    assert setting_of_suite(suite, settings) == setting


OTHERS = {
    "multihop": (MULTIHOP, {"people": 4, "text": "x", "published": True, "n": 4, "seed": 1, "bos": True}),
    "babilong": (BABILONG, {"facts": "hub", "text": "dataset", "n": 1000, "seed": 1, "bos": True}),
    "harness": (HARNESS, {"num_fewshot": 0, "limit": 1, "include": "x", "max_length": 9, "metadata": {"a": 1},
                          "bos": True, "beyond": True}),
    "playground": (PLAYGROUND, {"task": MANO | {"L": 9}, "n": 4, "seed": 1, "split": "train"}),
    "text": (TEXT, {"text_key": "x", "n": 4, "context": 32, "file_sha256": SHA[::-1]}),
}  # fmt: skip


@pytest.mark.parametrize("suite", OTHERS)
def test_any_two_settings_have_different_names(suite):
    usual, others = OTHERS[suite]
    subsets = itertools.chain.from_iterable(itertools.combinations(others, size) for size in range(len(others) + 1))
    names = [setting_of_suite(suite, usual | {key: others[key] for key in keys}) for keys in subsets]
    assert len({*names}) == len(names) == 2 ** len(others)


def test_a_file_in_another_folder_is_the_same_file():
    assert setting_of_suite("text", TEXT | {"file": "/elsewhere/my.jsonl"}) == setting_of_suite("text", TEXT)


def test_the_seed_of_a_run_is_its_default():
    """The playground's questions are those of the run's own seed, unless another one is given."""
    assert setting_of_suite("playground", PLAYGROUND | {"seed": 7}, 7) == "mano-10"
    assert setting_of_suite("playground", PLAYGROUND, 7) == "mano-10, seed=0"
    assert setting_of_suite("multihop", MULTIHOP, 7) == "fair, 5 people"

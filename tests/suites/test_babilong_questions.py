"""Prompts: their questions, their length, the source of their facts, and the scores of a reader and of guessing."""

import json
import re
import shutil
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from story_reader import answers, parse, split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from canonlm.suites.babilong import Babilong, BabilongSettings, published_settings
from canonlm.suites.babilong.facts import HUB
from canonlm.suites.babilong.prompts import PROMPTS, question_of
from canonlm.suites.babilong.world import OBJECTS, PEOPLE, PLACES, TASKS
from canonlm.suites.background import Neutral
from canonlm.suites.questions import scores

THEIRS = {  # answers and people of the public dataset
    *("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    *("john", "mary", "sandra", "daniel", "fred", "bill", "jeff", "apple", "milk", "football"),
}

every_task = pytest.mark.parametrize("task", TASKS)


def words(text):
    return len(text.split())


def in_bytes(text):
    return len(text.encode())


def with_beginning(text):
    """Like a tokenizer that needs more tokens for a word at the start of a text than inside one."""
    return len(text.split()) + 3


@pytest.fixture(scope="module")
def in_pieces():
    """Byte-level BPE like GPT-2's: a space is part of the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [ask(task, 2000)[0].prompt for task in TASKS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet))
    return lambda text: len(tokenizer.encode(text).ids)


def ask(task, length=0, tokens=words, split="test", **more):
    return Babilong(BabilongSettings(task=task, length=length, **more), tokens, split)


def read(prompt):
    """(instruction, examples, sentences, question) of a prompt."""
    instruction, *blocks = prompt.split("\n\n")
    form = re.compile(r"<context>\n(.*)\n</context>\nQuestion: (.*)\nAnswer:(?: (.*))?")
    *examples, (text, question, nothing) = [form.fullmatch(block).groups() for block in blocks]
    assert nothing is None
    return instruction, examples, split(text), question


def facts_of(prompt):
    """The facts in the text of a prompt."""
    return [sentence for sentence in read(prompt)[2] if parse([sentence])]


def reader(prompts):
    """A reader that knows the rules of the world and reads everything."""
    for index, prompt in enumerate(prompts):
        _, examples, sentences, question = read(prompt)
        (answer,) = answers(sentences, question)
        example = examples[0][2].rstrip(".")
        old = answers(split(examples[0][0]), examples[0][1])
        yield index, f" {example.replace(*old, answer)} ({question})"  # whose labels do not count


def graded(questions, answered):
    """An answer in bytes fits into the tokens that a model writes."""
    cut = ((questions[index], text[: questions.max_new_tokens]) for index, text in answered)
    return [{"slice": question.slice, "right": questions.grade(question, text)} for question, text in cut]


# -- the prompt -------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@every_task
@pytest.mark.parametrize("length", [0, 1500])
def test_a_reader_is_always_right(task, length):
    questions = ask(task, length, n=100)
    rows = graded(questions, reader(question.prompt for question in questions))
    assert len(rows) == 100
    assert all(row["right"] == {"correct": True} for row in rows)
    assert scores(rows, questions.measures)[0].value == 1


@every_task
def test_the_examples_are_right_and_of_another_world(task):
    _, examples, _, _ = read(ask(task)[0].prompt)
    assert len(examples) == {"qa5": 3}.get(task, 2)
    used = set()
    for text, question, answer in examples:
        assert len(parse(split(text))) == len(split(text))
        (right,) = answers(split(text), question)
        assert right in re.findall(r"\w+", answer)
        assert answer.endswith(".")
        used |= {word.lower() for word in re.findall(r"\w+", text + " " + question + " " + answer)}
    assert not used & ({label.lower() for label in (*PEOPLE, *PLACES, *OBJECTS)} | THEIRS)
    assert len({text for text, _, _ in examples}) == len(examples)


@every_task
def test_form_of_a_prompt(task):
    for question in ask(task, 800, n=20):
        instruction, examples, sentences, asking = read(question.prompt)
        assert instruction == PROMPTS[task]["instruction"]
        assert [list(example) for example in examples] == PROMPTS[task]["examples"]
        assert question.prompt.endswith(f"{asking}\nAnswer:")
        assert question_of(question.prompt) == asking
        assert len(sentences) > len(facts_of(question.prompt))


def test_cue_words_in_the_background_do_not_confuse(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("He asked: Question: Where is Irene? Answer: in the museum. " * 100)
    questions = ask("qa1", 600, text=str(path), n=5)
    for question, story in zip(questions, map(questions.story, range(5)), strict=True):
        assert question_of(question.prompt) == story.question


# -- length -----------------------------------------------------------------------------------------------------------


COUNTS = {"words": words, "bytes": in_bytes, "beginning": with_beginning, "bpe": None}


@pytest.mark.parametrize(
    ("task", "count", "file"),  # every two values together
    [(task, count, (i + j) % 2 == 1) for i, task in enumerate(TASKS) for j, count in enumerate(COUNTS)],
)
def test_the_prompt_is_as_long_as_it_can_be(task, count, file, in_pieces, tmp_path):
    count = COUNTS[count] or in_pieces
    more = {}
    if file:
        stream = Neutral().sentences(5, 0)
        path = tmp_path / "text.txt"
        path.write_text("\n\n".join(next(stream) for _ in range(900)))
        more = {"text": str(path)}
    length = 8000 if count is in_bytes else 1600
    longest = 160 if count is in_bytes else 60  # tokens of a sentence
    for question in ask(task, length, count, n=12, **more):
        assert length - longest < count(question.prompt) <= length


@every_task
def test_length_0_and_a_length_below_that_of_the_facts_are_the_facts_alone(task):
    for questions in (ask(task, 0, None, n=10), ask(task, 10, n=10)):  # without a length no tokenizer is needed
        for index, question in enumerate(questions):
            assert read(question.prompt)[2] == list(questions.story(index).facts)


def test_a_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("One sentence. Another one.")
    with pytest.raises(ValueError, match=r"text: expected a text file long enough for length=1000 .*text\.txt"):
        ask("qa1", 1000, text=str(path))[0]


# -- what does not change ---------------------------------------------------------------------------------------------


@every_task
def test_other_tokenizers_and_lengths_get_the_same_questions(task, in_pieces):
    first = ask(task, 1200, n=6)
    others = [ask(task, 3000, n=6), ask(task, 6000, in_bytes, n=6), ask(task, 2000, in_pieces, n=9), ask(task, n=6)]
    for index in range(6):
        _, _, sentences, question = read(first[index].prompt)
        filling = [sentence for sentence in sentences if not parse([sentence])]
        for other in others:
            _, _, more, same = read(other[index].prompt)
            assert same == question
            assert facts_of(other[index].prompt) == facts_of(first[index].prompt)
            assert other[index].answer == first[index].answer
            rest = [sentence for sentence in more if not parse([sentence])]
            shared = min(len(filling), len(rest))
            assert rest[:shared] == filling[:shared]


def test_facts_are_spread_out_in_order():
    places, first, last = [], 0, 0
    for question in (questions := ask("qa1", 700, n=400)):
        sentences = read(question.prompt)[2]
        facts = facts_of(question.prompt)
        first += sentences[0] in facts
        last += sentences[-1] in facts
        where = [sentences.index(fact) for fact in dict.fromkeys(facts)]
        places += [place / (len(sentences) - 1) for place in where]
    assert [facts_of(questions[i].prompt) for i in range(9)] == [list(questions.story(i).facts) for i in range(9)]
    assert 0.7 < first / last < 1.4
    tenths = Counter(min(9, int(10 * place)) for place in places)
    assert max(tenths.values()) < 1.4 * min(tenths.values())


def test_questions_are_functions_of_seed_split_and_index():
    questions, others = ask("qa2", 900, n=3), ask("qa2", 900, n=3)
    once = list(questions)
    assert list(questions) == [others[index] for index in (2, 1, 0)][::-1] == once
    keys = [{"seed": seed, "split": split} for seed in (0, 1) for split in ("train", "test")]
    result = {ask("qa2", 900, **key)[index].prompt for key in keys for index in (0, 1)}
    assert len(result) == 8
    lines = [tuple(s for s in read(prompt)[2] if not parse([s])) for prompt in result]
    assert len(set(lines)) == 8


def test_slices_give_the_position_of_the_last_needed_fact():
    questions = ask("qa2", 700, n=200)
    rows = graded(questions, reader(question.prompt for question in questions))
    for index, row in enumerate(rows):
        story = questions.story(index)
        sentences = read(questions[index].prompt)[2]
        after = len(story.facts) - 1 - story.support[-1]
        assert row["slice"]["later"] == min(after, 4)
        # by its number among the facts, as the same sentence may occur twice
        where = [place for place, sentence in enumerate(sentences) if parse([sentence])][story.support[-1]]
        assert row["slice"]["quarter"] == 1 + (where * 2 + 1) * 4 // (len(sentences) * 2)
    assert {row["slice"]["quarter"] for row in rows} == {1, 2, 3, 4}
    assert {row["slice"]["later"] for row in rows} == {0, 1, 2, 3, 4}


# -- the suite --------------------------------------------------------------------------------------------------------


def test_the_published_grid():
    grid = published_settings(n=7, seed=3)
    assert [settings.name for settings in grid] == [
        f"babilong-{task}-{length}k" for task in ("qa1", "qa2", "qa3", "qa4", "qa5") for length in (0, 1, 2, 4)
    ]
    assert {(settings.n, settings.seed) for settings in grid} == {(7, 3)}
    assert BabilongSettings(length=1500).name == "babilong-qa1-1.5k"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "qa6"}, "task: expected 'qa1', 'qa2', 'qa3', 'qa4' or 'qa5', got \"qa6\""),
        ({"length": -1}, "length: expected an integer >= 0, got -1"),
        ({"n": 0}, "n: expected an integer > 0, got 0"),
        ({"lenght": 5}, 'unknown setting "lenght". Did you mean "length"?'),
        ({"text": "dataset"}, 'facts: expected hub or a folder, for text=dataset, got "simulator"'),
        ({"text": "dataset", "facts": "hub", "length": 1500}, "length: expected a multiple of 1000, for text=dataset"),
    ],
    ids=["task", "length", "n", "unknown", "no-dataset", "no-such-length"],
)
def test_wrong_settings(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BabilongSettings(**given)


# -- facts from elsewhere ---------------------------------------------------------------------------------------------

ROWS = [
    {
        "input": "John went to the hallway. Mary moved to the bathroom.  John travelled back to the garden.",
        "question": "Where is John? ",
        "target": "garden",
    },
    {
        "input": "Sandra got there.\nSandra journeyed to the office.",
        "question": "Where is Sandra?",
        "target": " Office",
    },
    {"input": "Daniel went to the kitchen.", "question": "Where is Daniel?", "target": "kitchen"},
]


def write_rows(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "name", ["qa1.jsonl", "qa1.json", "qa1.parquet", "0k/qa1.jsonl", "0k/qa1.parquet", "0k/qa1-00000-of-00001.parquet"]
)
def test_a_local_copy(name, tmp_path):
    write_rows(tmp_path / name)
    write_rows(tmp_path / "qa10.jsonl", [{"input": "x", "question": "y", "target": "z"}])
    questions = ask("qa1", facts=str(tmp_path))
    assert len(questions) == 3
    assert questions.labels == ask("qa1", facts=str(tmp_path), n=1).labels == {"garden", "office", "kitchen"}
    assert [question.answer for question in questions] == ["garden", "Office", "kitchen"]
    assert read(questions[0].prompt)[2:] == (
        ["John went to the hallway.", "Mary moved to the bathroom.", "John travelled back to the garden."],
        "Where is John?",
    )
    assert "<context>\nSandra got there. Sandra journeyed to the office.\n</context>" in questions[1].prompt
    assert questions[0].slice == {}
    assert questions.grade(questions[1], " in the office")["correct"]
    assert not questions.grade(questions[1], " in the office or the kitchen")["correct"]
    assert questions.grade(questions[1], " in the office or the bathroom")["correct"]  # not a label of these rows


def test_shards_of_a_local_copy_follow_each_other(tmp_path):
    for number, row in enumerate(ROWS):
        write_rows(tmp_path / f"qa1-0000{number}-of-00003.parquet", [row])
        write_rows(tmp_path / f"qa1{number}-00000-of-00001.parquet", [row])  # of other tasks
    assert [question.answer for question in ask("qa1", facts=str(tmp_path))] == ["garden", "Office", "kitchen"]


def test_facts_of_a_local_copy_are_scattered_too(tmp_path):
    write_rows(tmp_path / "qa1.jsonl")
    for length in (600, 1000):
        (question,) = ask("qa1", length, facts=str(tmp_path), n=1)
        assert length - 60 < words(question.prompt) <= length
        sentences = read(question.prompt)[2]
        facts = [sentence for sentence in sentences if re.match("John|Mary", sentence)]
        assert facts == re.split(r"(?<=\.)\s+", ROWS[0]["input"])


def test_texts_in_the_format_of_the_dataset(tmp_path):
    write_rows(tmp_path / "qa1.jsonl")  # of length 0
    write_rows(tmp_path / "2k" / "qa1.jsonl", [{**ROWS[0], "input": " It was\nlate.  John went to the hallway. "}])
    questions = ask("qa1", 2000, facts=str(tmp_path), text="dataset")
    assert (questions.name, len(questions)) == ("babilong-qa1-2k", 1)
    assert "<context>\nIt was\nlate.  John went to the hallway.\n</context>" in questions[0].prompt
    with pytest.raises(ValueError, match=re.escape('facts: expected a folder with 1k/qa1.jsonl or .parquet, got "')):
        ask("qa1", 1000, facts=str(tmp_path), text="dataset")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: shutil.rmtree(path.parent), "facts: expected simulator, hub, or a folder, got"),
        (lambda path: None, "facts: expected a folder with 0k/qa1.jsonl or .parquet, or qa1.jsonl or .parquet, got"),
        (lambda path: path.write_text(""), "facts: expected at least one row for qa1, got"),
        (lambda path: path.mkdir(), "facts: expected a file that can be read (a folder), got"),
        (lambda path: path.write_text(json.dumps(ROWS[0]) + "\n\n{"), "a JSON object in UTF-8 as line 3 ("),
        (lambda path: path.write_bytes(b'{"input": "\xff"}'), "a JSON object in UTF-8 as line 1 ("),
        (lambda path: path.write_text("[1]\n"), "facts: expected a text as input in {path}, line 1, got None"),
        (
            lambda path: write_rows(path, [*ROWS, {**ROWS[0], "target": 7}]),
            "facts: expected a text as target in {path}, line 4, got 7",
        ),
        (
            lambda path: write_rows(path, [ROWS[0], {"input": "A. B.", "target": "b"}]),
            "facts: expected a text as question in {path}, line 2, got None",
        ),
        (
            lambda path: write_rows(path.with_suffix(".parquet"), [{"input": "A.", "question": " ", "target": "b"}]),
            'facts: expected a text as question in {parquet}, row 1, got " "',
        ),
        (
            lambda path: write_rows(path, [{**ROWS[0], "input": "A \ud800."}]),
            "half of a surrogate pair, which is not a Unicode character, as input in {path}, line 1, got",
        ),
        (lambda path: path.with_suffix(".parquet").write_text("no"), "facts: expected a Parquet file that can be read"),
    ],
    ids=[
        "folder",
        "file",
        "empty",
        "a-folder",
        "json",
        "utf-8",
        "no-object",
        "kind",
        "missing",
        "blank",
        "half",
        "parquet",
    ],
)
def test_unreadable_files_are_reported(write, message, tmp_path):
    path = tmp_path / "copy" / "qa1.jsonl"
    path.parent.mkdir()
    write(path)
    message = re.escape(message.format(path=path, parquet=path.with_suffix(".parquet")))
    with pytest.raises(ValueError, match=rf"\A.*{message}.*\Z"):
        ask("qa1", facts=str(path.parent))


def test_an_unreachable_hub(monkeypatch):
    def fail(*args, **more):  # its exact behaviour without a network
        raise ConnectionError(f"Couldn't reach '{HUB}' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    start = f"facts: expected a dataset that can be reached (Couldn't reach '{HUB}' on the Hub"
    command = f"load_dataset('{HUB}', '0k', split='qa2').to_json('babilong/0k/qa2.jsonl')"
    with pytest.raises(ValueError, match=rf"\A{re.escape(start)}.*{re.escape(command)}.*facts=simulator.*\Z"):
        ask("qa2", facts="hub")


def test_the_advice_in_the_message_works(monkeypatch, tmp_path):
    """The command in the message makes a file that can be read; the Hub is asked for the right part."""
    there, requested = datasets.Dataset.from_list(ROWS), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *what, split: requested.append((*what, split)) or there)
    there.to_json(tmp_path / "babilong" / "0k" / "qa1.jsonl")
    local, hub = ask("qa1", 900, facts=str(tmp_path / "babilong")), ask("qa1", 900, facts="hub")
    assert [question.prompt for question in local] == [question.prompt for question in hub]
    assert local.labels == hub.labels
    ask("qa3", 4000, facts="hub", text="dataset")
    assert requested == [(HUB, "0k", "qa1"), (HUB, "4k", "qa3")]


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="facts=hub needs the package datasets: pip install 'canonlm"):
        ask("qa1", facts="hub")

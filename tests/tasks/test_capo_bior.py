"""bioR: prompts state everything in every wording and order; texts are read with spans, and all losses are reported."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from capo_text import biography
from refusals import refused

from canonlm import tasks
from canonlm.tasks.capo.bior import prompt, read
from canonlm.tasks.capo.people import person
from canonlm.tasks.capo.pools import ATTRIBUTES, load

POOLS = load()
ANN = replace(
    person(0, 2, POOLS), first="Ann", middle="Bea", last="Cole", pronoun="She", birth_date="May 5, 2005",
    birth_city="Elmring, AZ", university="Uni", field="Law", company="Corp", company_city="Foxring, TN",
)  # fmt: skip

# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_names_everything_once_and_is_a_function_of_its_arguments():
    for i in range(100):
        who = person(4, i, POOLS)
        answer = prompt(who, 9, draw=3)
        assert answer == prompt(who, 9, draw=3)
        assert answer.count(who.name) == 1
        for value in who.values.values():
            assert value in answer
        assert f'"{who.pronoun}"' in answer
        assert "{" not in answer
        assert "  " not in answer
    drawn = {prompt(ANN, seed, draw=draw) for seed in range(20) for draw in range(20)}
    assert len(drawn) > 395  # 400 out of 28 x 6 x 14 x 2 wordings, 24 orders and 150 lengths


@pytest.mark.slow
def test_lengths_wordings_and_orders_are_uniform_and_independent(fits):
    lengths, wordings, orders = [], [], []
    values = {"university": "Uni", "city": "Elmring, AZ", "company": "Corp", "date": "May 5, 2005"}
    for draw in range(30_000):
        opening, rest = prompt(ANN, 1, draw=draw).split(" words about Ann Bea Cole. ")
        lengths.append(int(opening.removeprefix("Write a biography of about ")))
        units = re.split(r"(?<=\.) ", rest)[:4]
        order = [next(what for what, value in values.items() if value in unit) for unit in units]
        orders.append(tuple(order))
        wordings.append(dict(zip(order, units, strict=True)))
    assert (min(lengths), max(lengths)) == (50, 199)
    fits([lengths.count(length) for length in range(50, 200)])
    fits(_counts(orders, 24))
    for what, number in {"university": 7 * 4, "city": 6, "company": 14, "date": 2}.items():
        fits(_counts([answer[what] for answer in wordings], number))
    fits(_counts([(answer["city"], answer["company"]) for answer in wordings], 6 * 14))
    fits(_counts([(answer["date"], order) for answer, order in zip(wordings, orders, strict=True)], 2 * 24))


def _counts(items, kinds):
    counts = list(Counter(items).values())
    assert len(counts) == kinds
    return counts


def test_modes_and_word_counts():
    assert "of about 77 words" in prompt(ANN, 0, words=77)
    assert "of about 900 words" in prompt(ANN, 0, mode=1, words=900)
    assert prompt(ANN, 0, mode=1, words=9).startswith(prompt(ANN, 0, words=9) + " ")
    with pytest.raises(ValueError, match=r"^mode: expected 0 or 1, got 2$"):
        prompt(ANN, 0, mode=2)
    with pytest.raises(ValueError, match=r"^words: expected the number of words to ask for .*, got None$"):
        prompt(ANN, 0, mode=1)
    with pytest.raises(ValueError, match=r"^words: expected an integer from 1 to"):
        prompt(ANN, 0, words=0)


def test_articles_in_the_prompts():
    for draw in range(300):
        for article, word in re.findall(r"\b(an?) (\w+)", prompt(ANN, 0, draw=draw).replace("Uni", "University")):
            assert (article == "an") == (word[0] in "aeiou"), (article, word)


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    def write(rows, name="texts.jsonl", end="\n"):
        path = tmp_path / name
        lines = [json.dumps(row, ensure_ascii=False) if isinstance(row, dict) else row for row in rows]
        path.write_bytes((end.join(lines) + end).encode())
        return path

    return write


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_both_formats_give_texts_with_spans(written, end):
    about = [person(6, i, POOLS) for i in range(30)]
    texts = [biography(who, [i % 45] * 6, [5, 3, 1, 0, 2, 4]).strip() for i, who in enumerate(about)]
    plain = read(written(texts, "texts.txt", end), 6, POOLS)
    rows = [{"person": i, "text": texts[i], "model": "x"} for i in (7, 3, 7, *range(30))]
    keyed = read(written(rows, end=end), 6, POOLS)
    assert [result.person for result in keyed.texts] == [7, 3, 7, *range(30)]
    assert keyed.texts[3:] == plain.texts
    assert keyed.missing == plain.missing == ()
    for i, result in enumerate(plain.texts):
        assert result.text == texts[i]
        assert list(result.spans) == ["name", *ATTRIBUTES]
        for what, value in {"name": about[i].name, **about[i].values}.items():
            start, stop = result.spans[what]
            assert result.text[start:stop] == value


def test_missing_facts_are_listed_and_the_text_is_kept(written):
    who = person(6, 0, POOLS)
    text = biography(who, [0] * 6).replace(who.field, who.field.lower()).replace(who.middle, who.middle[0] + ".")
    result = read(written([{"person": 1, "text": "Hello."}, {"person": 0, "text": text}]), 6, POOLS)
    other = person(6, 1, POOLS)
    assert list(result.missing) == [
        *(
            f'line 1: the text about person 1 has no {what} "{value}"'
            for what, value in {"name": other.name, **other.values}.items()
        ),
        f'line 2: the text about person 0 has no name "{who.name}"',
        f'line 2: the text about person 0 has no field "{who.field}"',
    ]
    assert result.texts[0].spans == {}
    assert list(result.texts[1].spans) == ["birth date", "birth city", "university", "company city", "company"]


def test_spans_are_first_whole_word_matches_outside_longer_values(written):
    pools = replace(
        POOLS, first=("Ann",), middle=("Bea",), last=("Law",), city=("Rome",), university=("Rome Law College",),
        field=("Law",), company=("Rome College",), company_city=("Rome",),
    )  # fmt: skip
    date = person(0, 0, pools).birth_date
    text = f"Lawful Ann Bea Law of Rome Law College. Rome, Law, Rome College, {date}, Law, Rome. Ann Bea Law."
    (result,) = read(written([text], "texts.txt"), 0, pools).texts
    cut = {what: (text[:start][-9:], text[start:stop]) for what, (start, stop) in result.spans.items()}
    assert cut == {
        "name": ("Lawful ", "Ann Bea Law"),
        "birth date": ("College, ", date),
        "birth city": ("College. ", "Rome"),
        "university": ("a Law of ", "Rome Law College"),
        "field": ("e. Rome, ", "Law"),
        "company city": ("College. ", "Rome"),
        "company": ("me, Law, ", "Rome College"),
    }


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", None, ": cannot be read (No such file or directory"),
        ("a.jsonl", b"", ": expected one biography per line, got an empty file"),
        ("a.txt", b"One.\n\nThree.", ", line 2: expected a biography, got an empty text"),
        ("a.txt", b"One.\n\xfe", ", line 2: not UTF-8"),
        ("a.jsonl", b'{"person": 0, "text": " "}', ", line 1: expected a biography, got an empty text"),
        ("a.jsonl", b'{"person": 0, "text": "x"}\n[3]', ', line 2: expected {"person": 0, "text": "…"}, got [3]'),
        ("a.jsonl", b'{"person": 1}', ', line 1: expected {"person": 0, "text": "…"}, got {"person": 1}'),
        (
            "a.jsonl",
            b'{"person": true, "text": "x"}',
            ', line 1: expected {"person": 0, "text": "…"}, got {"person": true',
        ),
        ("a.jsonl", b'{"person": -1, "text": "x"}', ', line 1: expected {"person": 0, "text": "…"}, got {"person": -1'),
        (
            "a.jsonl",
            b'{"person": 0, "text"',
            ', line 1: expected {"person": 0, "text": "…"}, got invalid JSON (Expecting',
        ),
        ("a.jsonl", b'{"person": 160000000, "text": "x"}', ", line 1: the pools have names for 160000000 people, got"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name, content, complaint):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with refused(f"{path}{complaint}..."):
        read(path, 0, POOLS)


# -- training on texts ------------------------------------------------------------------------------------------------


@pytest.fixture
def rewrites(written):
    """A file with five texts about each of 12 people of seed 7, from templates, and the task that reads it."""
    source = tasks.get("capo", N=12)
    samples = {(i, k): source.sample("train", 7, i + 12 * k) for k in range(5) for i in range(12)}
    texts = {key: source.vocab.show(sample).removeprefix("<bos> ") for key, sample in samples.items()}
    path = written([{"person": i, "text": text} for (i, _), text in texts.items()])
    return tasks.get("capo", N=12, rewrites=str(path), people_seed=7, exposures=4), samples, texts


def test_rewrites_have_the_roles_and_facts_of_the_same_texts_from_templates(rewrites):
    task, samples, texts = rewrites
    for split, k in {"test": 4, "validation": 3, "valid": 3}.items():
        ids, roles = task.test_batch(0, 0, 12, split)
        for i in range(12):
            sample, same = task.sample(split, 0, i), samples[i, k]
            length = len(same.tokens)
            assert task.vocab.show(sample) == f"<bos> {texts[i, k]}"
            assert sample.tokens.tolist() == ids[i, :length].tolist()
            assert {query.slice["attribute"]: (query.start, query.stop) for query in sample.queries} == {
                query.slice["attribute"]: (query.start, query.stop) for query in same.queries
            }
            assert {key: sample.meta[key] for key in ("name", *ATTRIBUTES)} == {
                key: same.meta[key] for key in ("name", *ATTRIBUTES)
            }
            values = {place for query in same.queries for place in range(query.start, query.stop)}
            name = range(1, 1 + len(task.vocab.encode(f" {same.meta['name']}")))
            assert roles[i].tolist() == [
                -1 if at >= length else 3 if at in values else 1 if at in name else 0 for at in range(len(roles[i]))
            ]
    assert task.bits(0.0, 0.0).at_most == tasks.get("capo", N=12, fullname=True).bits(0.0, 0.0).at_most


def test_every_pass_has_each_person_once_in_the_texts_of_training_in_turn(rewrites):
    task, _, texts = rewrites
    count = task.training_windows(5, 64)
    windows = task.windows("train", 5, 0, count + 2, seq_len=64)
    assert (windows.labels[count:] == -100).all()
    numbers = {text: key for key, text in texts.items()}
    real = windows.input_ids[windows.labels != -100].tolist()
    borders = [at for at, token in enumerate(real) if token == 0]
    documents = [real[a:b] for a, b in zip(borders, [*borders[1:], len(real)], strict=True)]
    read_back = [numbers[task.vocab.text(document).removeprefix("<bos> ")] for document in documents]
    passes = [read_back[12 * e : 12 * e + 12] for e in range(4)]
    assert [sorted(each) for each in passes] == [[(i, e % 3) for i in range(12)] for e in range(4)]
    assert len({tuple(i for i, _ in each) for each in passes}) == 4
    for start in range(count):
        for every, one in zip(windows, task.windows("train", 5, start, 1, seq_len=64), strict=True):
            assert (every[start] == one[0]).all()
    placed = task.instances("train", 5, 1, 512)
    assert len(placed) > 3
    assert {task.vocab.text(each.sample.tokens.tolist()).removeprefix("<bos> ") for each in placed} <= numbers.keys()
    answers = task.windows("train", 5, 0, count, seq_len=64, loss_on="answer").labels
    values = " ".join(value for i in range(12) for value in person(7, i, POOLS).values.values())
    assert set(task.vocab.text(answers[answers != -100].tolist()).split()) <= set(values.split())


def test_texts_that_cannot_be_trained_on_are_refused_or_left_out(written, caplog):
    about = [person(0, i, POOLS) for i in range(2)]
    texts = [{"person": i, "text": biography(who, [k] * 6)} for k in range(3) for i, who in enumerate(about)]
    lacking = {"person": 0, "text": "Hello."}
    assert len(tasks.get("capo", N=2, rewrites=str(written([lacking, *texts]))).vocab)
    assert "left out: line 1: the text about person 0 has no name" in caplog.text
    twice = written([*texts[:-1], texts[1]], "twice.jsonl")
    what = (
        r"^capo.rewrites: expected 3 or more different texts with all facts about each of N = 2 people, got \"2 about "
    )
    with pytest.raises(ValueError, match=f'{what}person 1"$'):
        tasks.get("capo", N=2, rewrites=str(twice))
    for settings, expected in {
        '{"rewrites": "nowhere.jsonl"}': r"capo.rewrites: nowhere.jsonl: .*",
        '{"rewrites": "x", "questions": true}': "capo.questions: expected False, as rewrites are not made .*, got True",
        '{"people_seed": 1}': "capo.people_seed: expected no value without rewrites, got 1",
    }.items():
        with pytest.raises(ValueError, match=f"^{expected}$"):
            tasks.get("capo", **{"N": 2, **json.loads(settings)})

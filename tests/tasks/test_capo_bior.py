"""bioR: prompts state everything in every wording and order; texts are read with spans, and all losses are reported."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from capo_text import biography

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
    path.write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        read(path, 0, POOLS)
    assert str(refusal.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(refusal.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt: cannot be read \(No such file or directory"):
        read(tmp_path / "nothing.txt", 0, POOLS)

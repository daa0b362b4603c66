"""Birth-year multi-hop: facts and questions, checked by readers who see only the prompt."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from canonlm.suites.background import Neutral
from canonlm.suites.multihop import MultiHop, MultiHopSettings, published_settings
from canonlm.suites.questions import Question
from canonlm.tasks.capo.pools import load

NAME = r"(\w+ \w+ \w+)"
TOLD = re.compile(rf"{NAME} was born in (?:(\d+)|the same year as {NAME})\.")
ASKED = re.compile(rf"\n\nThe birth year of {NAME} is$")


def byte_count(text):
    return len(text.encode())


def word_count(text):
    return len(text.split())


def suite(tokens=word_count, split="test", **settings):
    return MultiHop(MultiHopSettings(**settings), tokens, split)


def oracle(prompt):
    """Reads the text and follows the names."""
    stated = {name: year or other for name, year, other in TOLD.findall(prompt)}
    answer = ASKED.search(prompt)[1]
    while not answer.isdigit():
        answer = stated[answer]
    return answer


def years(prompt):
    return [year for _, year, _ in TOLD.findall(prompt) if year]


def facts(prompt):
    return [match[0] for match in TOLD.finditer(prompt)]


def sentences(prompt):
    """The sentences of the text, which is between the tags, or before the blank line."""
    matches = re.search(r"<context>\n(.*)\n</context>", prompt)
    text = matches[1] if matches else prompt.partition("\n\n")[0]
    assert "\n" not in text
    assert "  " not in text
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


def share_right(questions, reader):
    right = [questions.grade(question, f" {reader(question.prompt)}.") for question in questions]
    assert all(row["exact"] == row["year"] for row in right)
    return sum(row["exact"] for row in right) / len(right)


SETTINGS = [
    {"k": k, "people": people, "background": background, "published": published}
    for k, people in ((1, 5), (2, 3), (3, 4))
    for background in (0, 80)
    for published in (False, True)
]


def name_of(settings):
    return f"k={settings['k']} M={settings['background']}{' published' * settings['published']}"


every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=name_of)


# -- facts and questions ----------------------------------------------------------------------------------------------


@every_setting
def test_an_oracle_is_always_right(settings):
    assert share_right(suite(**settings, n=200), oracle) == 1


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("k", "people", "place", "published"),
    [*((k, 4, place, False) for k in (1, 2, 3) for place in (0, -1)), (2, 3, 0, True)],
)
def test_no_year_by_position_beats_chance(k, people, place, published):
    questions = suite(k=k, people=people, published=published, n=2000)
    right = round(2000 * share_right(questions, lambda prompt: years(prompt)[place]))
    assert binomtest(right, 2000, 1 / people).pvalue > 1e-4


def test_the_first_year_is_the_answer_to_every_published_single_hop():
    questions = suite(k=1, published=True, background=100, n=100)
    assert share_right(questions, lambda prompt: years(prompt)[0]) == 1


@every_setting
def test_groups_are_matched_one_to_one(settings):
    k, n = settings["k"], settings["people"]
    pools = load()
    for question in suite(**settings, n=30):
        stated = {name: year or other for name, year, other in TOLD.findall(question.prompt)}
        assert len(stated) == k * n
        direct = [value for value in stated.values() if value.isdigit()]
        assert len(set(direct)) == len(direct) == n
        assert all(1950 <= int(year) <= 2009 for year in direct)
        group = {name for name, value in stated.items() if value.isdigit()}
        for _ in range(k - 1):
            following = {name for name, value in stated.items() if value in group}
            assert {stated[name] for name in following} == group
            group = following
        assert ASKED.search(question.prompt)[1] in group
        for name in stated:
            first, middle, last = name.split()
            assert first in pools.first
            assert middle in pools.middle
            assert last in pools.last
        if settings["published"]:
            order = list(stated)
            assert [value.isdigit() for value in stated.values()] == [True] * n + [False] * (k - 1) * n
            assert ASKED.search(question.prompt)[1] == order[(k - 1) * n]


@pytest.mark.slow
@pytest.mark.parametrize(("k", "people", "n"), [(1, 5, 20_000), (2, 3, 8000)], ids=["one-hop", "two-hops"])
def test_the_needed_fact_is_anywhere_and_any_year_is_the_answer(k, people, n):
    questions = suite(k=k, people=people, n=n)
    positions, answers = Counter(), Counter()
    for question in questions:
        stated = TOLD.findall(question.prompt)
        position = 1 + [year for _, year, _ in stated].index(question.answer)
        assert question.slice["position"] == position
        positions[position] += 1
        answers[question.answer] += 1
    assert sorted(positions) == list(range(1, k * people + 1))
    assert chisquare(list(positions.values())).pvalue > 1e-3
    assert len(answers) == 60
    assert chisquare(list(answers.values())).pvalue > 1e-3


def test_the_needed_fact_is_anywhere_in_the_background():
    questions = suite(k=1, background=40, n=5000)
    quarters = Counter(question.slice["quarter"] for question in questions)
    assert sorted(quarters) == [1, 2, 3, 4]
    assert chisquare(list(quarters.values())).pvalue > 1e-3


@pytest.mark.parametrize("k", [2, 3])
def test_backward_counts_the_links_stated_too_early(k):
    for question in suite(k=k, people=3, n=200):
        stated = [name for name, _, _ in TOLD.findall(question.prompt)]
        value = {name: other for name, _, other in TOLD.findall(question.prompt)}
        name, backward = ASKED.search(question.prompt)[1], 0
        assert question.slice["asked"] == stated.index(name) + 1
        while value[name]:
            backward += stated.index(name) < stated.index(value[name])
            name = value[name]
        assert question.slice["backward"] == backward
    assert not any("backward" in question.slice for question in suite(k=k, people=3, n=5, published=True))


# -- the prompt and its background ------------------------------------------------------------------------------------


@every_setting
def test_a_prompt_is_text_and_the_beginning_of_an_answer(settings):
    for question in suite(**settings, n=20):
        assert question.prompt == question.prompt.strip()
        assert ASKED.search(question.prompt)
        assert question.prompt.count("<context>\n") == question.prompt.count("\n</context>\n") == (settings["k"] > 1)
        parts = question.prompt.split("\n\n")
        assert len(parts) == (2 if settings["k"] == 1 else 3)
        background = [sentence for sentence in sentences(question.prompt) if not TOLD.fullmatch(sentence)]
        assert not re.search(r"\d", " ".join(background))
        assert bool(background) == (settings["background"] > 0)
        assert ("quarter" in question.slice) == (settings["background"] > 0)


@given(
    k=st.integers(1, 3),
    people=st.integers(1, 8),
    budget=st.integers(0, 1500),
    seed=st.integers(0, 10**6),
    index=st.integers(0, 499),
    published=st.booleans(),
)
def test_two_tokenizers_get_the_same_questions(k, people, budget, seed, index, published):
    settings = {"k": k, "people": people, "seed": seed, "published": published}
    result = {}
    for tokens in (byte_count, word_count):
        questions = suite(tokens, background=budget, **settings)
        question = questions[index]
        assert question == questions[index]  # the second time it is not counted again
        stated = sentences(question.prompt)
        background = [sentence for sentence in stated if not TOLD.fullmatch(sentence)]
        total = sum(map(tokens, background))
        assert total >= budget
        assert not background or total - tokens(background[-1]) < budget
        places = questions.story(index).places
        assert len(places) == k * people
        assert list(places) == sorted(places)
        slots = [int(place * (len(background) + 1)) for place in places]
        before = [sum(s in background for s in stated[:at]) for at, s in enumerate(stated) if s not in background]
        assert before == slots
        result[tokens] = facts(question.prompt), places, ASKED.search(question.prompt)[1], question.answer, background
    (*asked_by_bytes, fewer), (*asked_by_words, more) = result[byte_count], result[word_count]
    assert asked_by_bytes == asked_by_words
    assert more[: len(fewer)] == fewer
    assert len(fewer) <= len(more)


def test_the_background_changes_nothing_else(tmp_path):
    (tmp_path / "text.txt").write_text("It was in 1984. Then it was not. " * 50)
    plain = suite(k=2, n=50)
    for settings in ({"background": 90}, {"background": 300}, {"background": 300, "text": str(tmp_path / "text.txt")}):
        for a, b in zip(plain, suite(k=2, n=50, **settings), strict=True):
            assert facts(a.prompt) == facts(b.prompt)
            assert a.answer == b.answer == oracle(b.prompt)
            assert a.slice.items() <= b.slice.items()


def test_a_text_file_is_the_background(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Alpha beta gamma. Delta. Epsilon zeta. Eta theta iota kappa.")
    full = sentences(path.read_text())
    starts = set()
    for question in suite(text=str(path), background=9, n=60):
        background = [sentence for sentence in sentences(question.prompt) if not TOLD.fullmatch(sentence)]
        start = full.index(background[0])
        starts.add(start)
        assert background == [*full[start:], *full[:start]][: len(background)]
        assert sum(map(word_count, background[:-1])) < 9 <= sum(map(word_count, background))
    assert starts == {0, 1, 2, 3}
    assert len(sentences(suite(text=str(path), background=10)[0].prompt)) == 5 + 4
    with pytest.raises(ValueError, match=r"^background: expected at most 10 tokens, .* the text has, got 11$"):
        suite(text=str(path), background=11)[0]
    with pytest.raises(ValueError, match=r"^text: expected a text file"):
        suite(text=str(tmp_path / "none.txt"))


# -- a function of seed, split and index ------------------------------------------------------------------------------


def test_questions_are_functions_of_seed_split_and_index():
    questions = list(suite(background=50, n=40))
    assert suite(background=50, n=500)[17] == questions[17]
    assert questions[-1] == suite(background=50, n=40)[-1]
    with pytest.raises(IndexError):
        suite(n=40)[40]
    others = [suite(background=50, n=40, seed=1), suite(background=50, n=40, split="train")]
    for other in others:
        assert not {sentence for q in questions for sentence in facts(q.prompt)} & {
            sentence for q in other for sentence in facts(q.prompt)
        }
    first = [next(s for s in sentences(q[0].prompt) if not TOLD.fullmatch(s)) for q in (suite(background=9), *others)]
    assert len(set(first)) == 3, "splits and seeds have backgrounds of their own"
    assert first[0] != next(Neutral().sentences(0, 0)), "and another suite, asked with this seed, has others too"


def test_a_question_equals_the_pinned_one():
    """Numbers published with a seed can be reproduced, even with another Python."""
    question = suite(k=2, people=2, background=8)[0]
    assert sentences(question.prompt) == PINNED
    assert ASKED.search(question.prompt)[1] == "Milivan Wyneny Vanaker"
    assert (question.answer, question.slice) == ("1963", {"position": 3, "quarter": 4, "asked": 1, "backward": 1})


PINNED = [
    "Before breakfast, the neighbours set aside the rusty ladders above the cellar door.",
    "Milivan Wyneny Vanaker was born in the same year as Kasina Arosh Wynbert.",
    "Emara Valira Talvane was born in 1969.",
    "Kasina Arosh Wynbert was born in 1963.",
    "Alina Floya Glaser was born in the same year as Emara Valira Talvane.",
]


# -- grading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer_text", "exact", "year"),
    [
        *((text, True, True) for text in (" 1973.", "1973", "\n1973 or so", " 1973, not 1980", " 1973th")),
        *((text, False, True) for text in (" the year 1973", " 12 or 1973", " (1973)")),
        *((text, False, False) for text in (" 19731", "11973", " 1974", " 1980, no, 1973", " 1 9 7 3", " 197", "")),
        (" ١٩٧٣", False, False),
    ],
)
def test_correct_answers(answer_text, exact, year):
    assert suite().grade(Question("", "1973"), answer_text) == {"exact": exact, "year": year}


# -- settings ---------------------------------------------------------------------------------------------------------


def test_the_published_grid():
    grid = published_settings(seed=3)
    lengths = ["0k", "0.5k", "1k", "2k", "3k", "4k", "5k", "6k"]
    assert [settings.name for settings in grid] == [f"{k}hop-{length}" for k in (1, 2) for length in lengths]
    assert {(settings.k, settings.people) for settings in grid} == {(1, 5), (2, 3)}
    assert all(settings.published and settings.seed == 3 for settings in grid)
    assert [settings.background for settings in grid[:8]] == [0, 500, 1000, 2000, 3000, 4000, 5000, 6000]
    assert MultiHopSettings(background=1234).name == "1hop-1.234k"
    assert MultiHopSettings(k=12, background=1_000_001).name == "12hop-1000.001k"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"people": 61}, r"people: expected an integer >= 1 and <= 60, got 61"),
        ({"people": 0}, r"people: expected an integer >= 1 and <= 60, got 0"),
        ({"k": 0}, r"k: expected an integer > 0, got 0"),
        ({"k": True}, r"k: expected an integer > 0, got True"),
        ({"k": "2"}, r'k: expected an integer > 0, got "2"'),
        ({"background": -1}, r"background: expected an integer >= 0, got -1"),
        ({"background": 0.5}, r"background: expected an integer >= 0, got 0.5"),
        ({"published": "yes"}, r'published: expected true or false, got "yes"'),
        ({"text": 3}, r"text: expected a string, got 3"),
        ({"hops": 2}, r'unknown setting "hops"\. .*Settings: background, k, n, people, published, seed, text\.'),
        ({"people": 60, "k": 3_000_000}, r"people: expected at most 160000000 people .* got 180000000"),
        ({"split": "trian"}, r'unknown split "trian"\. Did you mean "train"\?.*'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_settings(settings, error):
    with pytest.raises(ValueError, match=f"^{error}$"):
        suite(**settings)

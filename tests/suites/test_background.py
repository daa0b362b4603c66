"""Backgrounds: words that the generator never uses, the start and end of a text file, the length of both."""

import re
from collections import Counter
from itertools import chain, islice
from math import perm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from canonlm.suites.babilong.world import OBJECTS, PEOPLE, PLACES
from canonlm.suites.background import TEMPLATES, WORDS, Neutral, TextFile, fill, open_background
from canonlm.tasks.capo.pools import MONTHS, load

SAID = " ".join([*TEMPLATES, *chain(*WORDS.values())])
WORDS_SAID = set(re.findall(r"[a-z]+", SAID.lower())) - set(WORDS)
BABILONG = (
    "bathroom bedroom garden hallway kitchen office mary john sandra daniel fred bill jeff julie apple milk football"
)
LENGTHS = {"bytes": lambda text: len(text.encode()), "words": lambda text: len(text.split())}


def drawn(count, seed=0, index=0):
    return list(islice(Neutral().sentences(seed, index), count))


# -- the generator ----------------------------------------------------------------------------------------------------


def test_neutral_text_contains_no_possible_answer():
    assert re.fullmatch(r"[a-z ,.{}\[\]01_]+", SAID), "letters only, and no capital but that of a sentence"
    assert not re.search(r"\d", re.sub(r"\[[01]\]", "", SAID))
    pools = load()
    names = {word for pool in (pools.first, pools.middle, pools.last) for name in pool for word in name.split()}
    assert len(names) > 1500
    answers = {word.lower() for word in (*names, *MONTHS, *PEOPLE, *PLACES, *OBJECTS)} | set(BABILONG.split())
    assert not WORDS_SAID & (answers | {"born", "birth", "year", "years", "date", "age"})


def test_neutral_sentences_are_sentences():
    for sentence in drawn(3000):
        assert re.fullmatch(r"[A-Z][a-z ,]+\.", sentence)
        assert "  " not in sentence
    assert all(len(set(choices)) == len(choices) for choices in WORDS.values())


def test_neutral_has_hundreds_of_millions_of_sentences_and_rarely_repeats_one():
    sizes = []
    for template in TEMPLATES:
        slots = Counter(re.findall(r"{(\w+)", template))
        sizes.append(prod(perm(len(WORDS[slot]), times) for slot, times in slots.items()))
    assert sum(sizes) > 200_000_000
    sentences = drawn(20_000)
    # Of n draws, a tenth from each template of s sentences, about (n / 10)^2 / 2s repeat an earlier one.
    repeats = sum((len(sentences) / len(TEMPLATES)) ** 2 / 2 / size for size in sizes)
    assert len(sentences) - len(set(sentences)) < 2 * repeats + 20


def test_comparisons_name_two_different_things():
    facts = [re.match(r".* prefer (.*) to (.*), .*", sentence) for sentence in drawn(5000)]
    pairs = [match.groups() for match in facts if match]
    assert len(pairs) > 300
    assert all(a != b for a, b in pairs)


def test_streams_are_functions_of_seed_and_index():
    assert drawn(50, 3, 7) == drawn(50, 3, 7)
    assert drawn(50, 3, 7)[:20] == drawn(20, 3, 7)
    others = [drawn(50, 3, 8), drawn(50, 4, 7), drawn(50, 37, 0)]
    assert all(not set(drawn(50, 3, 7)) & set(other) for other in others)


# -- a text file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "text.txt"


def test_a_text_file_wraps_around_once(path):
    path.write_text("One is first. Two is\nsecond! Is three third?\n\nA heading\n\n“Four.” Five… Six")
    file = TextFile(path)
    sentences = ["One is first.", "Two is second!", "Is three third?", "A heading", "“Four.”", "Five…", "Six"]
    starts = Counter()
    for index in range(7000):
        read = list(file.sentences(0, index))
        start = sentences.index(read[0])
        assert read == sentences[start:] + sentences[:start]
        starts[start] += 1
    assert len(starts) == 7
    assert chisquare(list(starts.values())).pvalue > 1e-3
    assert [*file.sentences(5, 3)] == [*file.sentences(5, 3)]


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        ("\ufeffA b.\r\nC d.\r\n\r\nE", ["A b.", "C d.", "E"]),
        ("3.5 is a number. So is 4.", ["3.5 is a number.", "So is 4."]),
        ("(Aside.) Then \t  on.", ["(Aside.)", "Then on."]),
        ("一。二！三", ["一。", "二！", "三"]),
    ],
    ids=["bom-and-crlf", "decimals", "brackets", "chinese"],
)
def test_where_sentences_end(path, content, sentences):
    path.write_bytes(content.encode())
    assert sorted(TextFile(path).sentences(0, 0)) == sorted(sentences)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a text file with at least one sentence"),
        (b" \n\n \n", "a text file with at least one sentence"),
        (b"One.\nTwo \xff.", r"a text file in UTF-8 \(line 2 is not UTF-8\)"),
        ("nowhere.txt", r"a text file in UTF-8 \(No such file.*\)"),
        (".", r"a text file in UTF-8 \(a folder\)"),
    ],
    ids=["empty", "blank", "latin-1", "nowhere", "a-folder"],
)
def test_missing_text_is_one_line(path, content, why):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path = content
    with pytest.raises(ValueError, match=rf'^text: expected {why}, got "{path}"$'):
        open_background(str(path))


# -- length -----------------------------------------------------------------------------------------------------------


@given(budget=st.integers(-5, 3000), length=st.sampled_from(sorted(LENGTHS)), index=st.integers(0, 1000))
def test_fill_stops_with_the_sentence_that_reaches_the_budget(budget, length, index):
    count = LENGTHS[length]
    chosen = fill(Neutral().sentences(0, index), budget, count)
    assert chosen == drawn(len(chosen), 0, index)
    if budget <= 0:
        assert chosen == []
    else:
        assert sum(map(count, chosen[:-1])) < budget <= sum(map(count, chosen))

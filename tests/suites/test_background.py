"""Backgrounds: words that the generator never uses, the start and end of a text file, the length of both."""

import re
from collections import Counter
from itertools import chain, islice
from math import perm, prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

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
    assert not WORDS_SAID & {month.lower() for month in MONTHS}
    assert not WORDS_SAID & set(BABILONG.split())
    assert not WORDS_SAID & {"born", "birth", "year", "years", "date", "age"}


def test_neutral_text_contains_no_name_of_a_person():
    pools = load()
    names = {word.lower() for pool in (pools.first, pools.middle, pools.last) for name in pool for word in name.split()}
    assert len(names) > 1500
    assert not WORDS_SAID & names


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
def text(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "text.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_a_text_file_wraps_around_once(text):
    file = TextFile(text("One is first. Two is\nsecond! Is three third?\n\nA heading\n\n“Four.” Five… Six"))
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
def test_where_sentences_end(text, content, sentences):
    assert sorted(TextFile(text(content)).sentences(0, 0)) == sorted(sentences)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a text file with at least one sentence"),
        (b" \n\n \n", "a text file with at least one sentence"),
        (b"One.\nTwo \xff.", r"a text file in UTF-8 \(line 2 is not UTF-8\)"),
    ],
    ids=["empty", "blank", "latin-1"],
)
def test_missing_text_is_one_line(text, content, why):
    path = text(content)
    with pytest.raises(ValueError, match=rf'^text: expected {why}, got "{path}"$'):
        open_background(str(path))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r'^text: expected a text file in UTF-8 \(No such file.*\), got "nowhere.txt"$'
    ):
        open_background("nowhere.txt")
    with pytest.raises(ValueError, match=r"^text: expected a text file in UTF-8 \(a folder\)"):
        open_background(str(tmp_path))


def test_the_default_background_is_the_generator(text):
    assert isinstance(open_background(None), Neutral)
    assert isinstance(open_background(str(text("Hm."))), TextFile)


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


def test_a_text_that_is_too_short_is_reported(text):
    file = TextFile(text("One two three. Four five."))
    assert len(fill(file.sentences(0, 0), 5, LENGTHS["words"])) == 2
    with pytest.raises(ValueError, match=r"^background: expected at most 5 tokens, .* the text has, got 6$"):
        fill(file.sentences(0, 0), 6, LENGTHS["words"])

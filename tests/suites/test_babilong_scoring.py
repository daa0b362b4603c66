"""When a free-form answer counts as right."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from canonlm.suites.babilong.scoring import right

PLACES = ("bakery", "cinema", "hospital", "library", "museum", "station")
QUESTION = "Where is Irene?"
labels = st.sampled_from(PLACES)
WORDS = ["so", "I", "think", "that", "she", "is", "in", "the", "big", "room", "now", "and", "not", ",", ":", "-", "!"]
fillers = st.lists(st.sampled_from(WORDS)).map(" ".join)
anything = st.text(max_size=40)


def any_case(text):
    return st.sampled_from([text, text.upper(), text.capitalize()])


def counts_as_right(text, answer="museum", question=QUESTION, of=PLACES):
    return right(text, answer, question, of)


@given(before=fillers, after=fillers, answer=labels, data=st.data())
def test_the_right_label_in_any_sentence_is_right(before, after, answer, data):
    assert counts_as_right(f"{before} {data.draw(any_case(answer))} {after}", answer)


@given(before=fillers, between=fillers, answer=labels, other=labels, data=st.data())
def test_another_label_makes_it_wrong(before, between, answer, other, data):
    assume(answer != other)
    both = data.draw(st.permutations([answer, other]))
    assert not counts_as_right(f"{before} {both[0]} {between} {both[1]}", answer)
    assert not counts_as_right(f"{before} {other}", answer)
    assert not counts_as_right(before, answer)


@given(before=fillers, between=fillers, answer=labels, question_words=labels, data=st.data())
def test_labels_in_the_question_are_ignored(before, between, answer, question_words, data):
    assume(answer != question_words)
    question = f"Where was the violin before the {question_words}?"
    both = data.draw(st.permutations([answer, question_words]))
    assert counts_as_right(f"{before} {both[0]} {between} {both[1]}", answer, question)
    assert not counts_as_right(f"{before} {question_words}", answer, question)
    assert not counts_as_right(f"{before} {question_words}", question_words, question)  # it is never an answer


@given(before=fillers, answer=labels, after=anything, end=st.sampled_from([".", "<context>", "<example>", "<CONTEXT>"]))
def test_text_after_the_end_does_not_count(before, answer, after, end):
    assert counts_as_right(f"{before} {answer}{end}{after} cinema museum", answer)
    assert not counts_as_right(f"{before}{end} {answer}", answer)


@given(text=anything, answer=labels)
def test_line_breaks_do_not_end_an_answer(text, answer):
    assume("." not in text and "<" not in text and not any(place in text.lower() for place in PLACES))
    assert counts_as_right(f"{text}\n\n{answer}", answer)
    assert counts_as_right(f"{answer}\n{text}", answer)


@pytest.mark.parametrize("text", ["museums", "a museumlike room", "themuseum", "muse um", "", "museum_2"])
def test_a_label_is_a_whole_word(text):
    assert not counts_as_right(text)


@pytest.mark.parametrize("text", ["museum", "(museum)", "The MUSEUM!", "museum, museum", "'museum'", "museum-ish"])
def test_text_around_the_answer_does_not_matter(text):
    assert counts_as_right(text)


def test_labels_with_several_words_or_punctuation():
    assert counts_as_right("in the town hall", "Town hall", of=("town hall", "c++ lab"))
    assert counts_as_right("in the C++ lab", "c++ lab", of=("town hall", "c++ lab"))
    assert not counts_as_right("in the town, hall", "town hall", of=("town hall", "c++ lab"))


@given(
    words=st.lists(st.sampled_from([*PLACES, "in", "the", "Museum", "cinemas", ".", "\n", "<context>", "Irene"])),
    answer=labels,
    question_words=st.lists(labels, max_size=2),
)
def test_equals_a_second_implementation(words, answer, question_words):
    """Against a second implementation, word by word."""
    left = words[: next((i for i, word in enumerate(words) if word in (".", "<context>")), len(words))]
    named = {word.lower() for word in left if word.lower() in PLACES} - set(question_words)
    question = f"Where was it before the {' or the '.join(question_words)}?"
    assert counts_as_right(" ".join(words), answer, question) == (named == {answer})
    assert counts_as_right(re.sub(" ", "  ", " ".join(words)), answer, question) == (named == {answer})

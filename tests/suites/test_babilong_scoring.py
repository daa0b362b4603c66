"""When a free-form answer counts as right."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from canonlm.suites.babilong.scoring import right

PLACES = ("bakery", "cinema", "hospital", "library", "museum", "station")
LABELS = (*PLACES, "town hall", "c++ lab")
ENDS = (".", "<context>", "<example>", "<CONTEXT>")
labels = st.sampled_from(["museum", "cinema", "library"])
words = st.sampled_from(
    ["museum", "cinema", "Museum", "CINEMA", "cinemas", "in", "the", ",", "-", "\n", "Irene", *ENDS]
)


@given(
    words=st.lists(words) | st.lists(words.filter(lambda word: word not in ENDS), max_size=4),
    answer=labels,
    question_words=st.lists(labels, max_size=2),
)
@example(["museum"], "museum", ["museum"])  # a label in the question is never an answer
def test_equals_a_second_implementation(words, answer, question_words):
    """Word by word: the text before its end names the right label, and no other but those in the question."""
    left = words[: next((i for i, word in enumerate(words) if word in ENDS), len(words))]
    named = {word.lower() for word in left if word.lower() in PLACES} - set(question_words)
    question = f"Where was it before the {' or the '.join(question_words)}?"
    for text in (" ".join(words), re.sub(r" +(?=[.<])", "", "  ".join(words))):
        assert right(text, answer, question, PLACES) == (named == {answer})


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *((text, "museum") for text in ("(museum)", "The MUSEUM!", "museum, museum", "'museum'", "museum-ish")),
        *((text, None) for text in ("museums", "a museumlike room", "themuseum", "muse um", "", "museum_2")),
        *((f"museum{end} cinema, library", "museum") for end in ENDS),
        *((f"museum\n\n {word}{end} museum", None) for end in (*ENDS, "") for word in ("cinema", "town hall")),
        *((f"{end} museum", None) for end in ENDS),
        *(("in the town hall", "Town hall"), ("in the C++ lab", "c++ lab"), ("in the town, hall", None)),
    ],
)
def test_a_label_is_a_whole_word_or_several(text, label):
    for answer in ("museum", "Town hall", "c++ lab"):
        assert right(text, answer, "Where is Irene?", LABELS) == (answer == label)

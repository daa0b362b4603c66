"""The task: what counts as a sentence, what the grader returns, and what is refused."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from canonlm import tasks
from canonlm.tasks.lano import RELEASED, Grammar

SEED = st.integers(0, 2**40)
TINY = "root = a b | b a\na = 1 2 | 2 1 1\nb = 2 2 | 1\n"
SENTENCES = {
    x + y for a, b in product([(1, 2), (2, 1, 1)], [(2, 2), (1,)]) for x, y in ((a, b), (b, a))
}  # fmt: skip


def tiny_task(folder):
    (folder / "tiny.txt").write_text(TINY)
    return tasks.get("lano", grammar=str(folder / "tiny.txt"))


@pytest.fixture
def tiny(tmp_path):
    return tiny_task(tmp_path)


@given(st.sampled_from(["cfg3f", "cfg3b", "cfg3k", "cfg3e1"]), *[SEED] * 3, st.sampled_from(["train", "valid", "test"]))
def test_a_sample_is_a_sentence_and_two_questions(name, seed, index, j, split):
    task = tasks.get("lano", grammar=name)
    sample = task.sample(split, seed, index, j)
    n = len(sample.tokens) - 1
    assert sample.meta["n"] == n
    assert task.max_len == 1 + task.grammar.max_len
    assert [(q.start, q.stop, q.slice) for q in sample.queries] == [
        (1, n + 1, {"from": "start"}), (51, n + 1, {"from": "cut"}),
    ]  # fmt: skip
    assert [query.slice for query in sample.queries] == task.slices()
    np.testing.assert_array_equal(sample.labels, sample.tokens)
    again = task.from_original(task.to_original(sample))
    np.testing.assert_array_equal(again.tokens, sample.tokens)
    assert task.to_original(sample) == task.grammar.sample(split, seed, index, j).tokens.tolist()


@settings(max_examples=20)
@given(st.sampled_from(["cfg3f", "cfg3b", "cfg3k"]), SEED)
def test_the_reference_answer_is_correct_in_every_form(name, seed):
    task = tasks.get("lano", grammar=name)
    sample = task.sample("test", seed, 0)
    answers = [sample.tokens[query.start : query.stop].tolist() for query in sample.queries]
    closed = [[*answer, 0] for answer in answers]
    further = [[*answer, 0, 1, 2, 0] for answer in answers]  # the model continues with the next sentence
    for form in (answers, [np.array(a) for a in answers], [tuple(a) for a in answers], closed, further, sample.tokens):
        verdicts = task.grade(sample, form)
        assert [verdict.slice for verdict in verdicts] == task.slices()
        assert all(verdict.correct and verdict.why == "" for verdict in verdicts)
    for flat in (answers[0], closed[0], np.array(closed[0])):  # closed[0] is as long as the sample
        assert [verdict.correct for verdict in task.grade(sample, flat)] == [True, False]


@given(SEED, SEED)
def test_any_sentence_is_right_from_the_start(seed, other):
    task = tasks.get("lano")
    sample = task.sample("test", seed, 0)
    answer = task.sample("test", other, 1).tokens[1:].tolist()
    first, second = task.grade(sample, [answer, answer[50:]])
    assert first.correct
    full = [*sample.tokens[1:51].tolist(), *answer[50:]]
    assert second.correct == task.grammar.contains(full)


@given(tokens=st.lists(st.integers(1, 2), max_size=8).map(tuple))
def test_correct_means_in_the_language(tmp_path_factory, tokens):
    task = tiny_task(tmp_path_factory.mktemp("grammars"))
    (verdict,) = task.grade(task.read([0, 1, 2, 1]), [tokens])
    assert verdict.correct == (tokens in SENTENCES)
    if verdict.correct:
        return
    number = int(verdict.why.split("at token ")[1].split()[0])
    begun = {sentence[:n] for sentence in SENTENCES for n in range(len(sentence) + 1)}
    assert tokens[: number - 1] in begun
    if number <= len(tokens):
        assert tokens[:number] not in begun
    else:
        assert verdict.why.endswith("the sentence is not complete")


def test_explanations_of_verdicts(tiny):
    sample = tiny.read([0, 1, 2, 2, 2])
    message = "not in the language: at token"
    for output, why in (
        ([1, 2, 2, 1], f"got 4 tokens; {message} 4 no sentence that starts like this goes on with 1"),
        ([2, 1, 2], f"got 3 tokens; {message} 3 no sentence that starts like this goes on with 2"),
        ([1, 2, 0, 2, 2], f"got 2 tokens; {message} 3 the sentence is not complete"),
        ([0, 1, 2, 1], f"got nothing; {message} 1 the sentence is not complete"),
        ([], f"got nothing; {message} 1 the sentence is not complete"),
        ([1, 3, 2, 2], f"got 4 tokens; {message} 2 expected 1 … 2, got <3>"),
        ([1, True, 2, 2], f"got 4 tokens; {message} 2 expected 1 … 2, got <True>"),
        ([1, 2, 2, 2.0], f"got 4 tokens; {message} 4 expected 1 … 2, got <2.0>"),
        ([1, 2, 2, 2, 1, 1], f"got 6 tokens; {message} 5 no sentence that starts like this goes on with 1"),
    ):
        (verdict,) = tiny.grade(sample, [output])
        assert (verdict.correct, verdict.why) == (False, why)


def test_one_flat_answer_may_be_as_long_as_the_sample(tiny):
    sample = tiny.read([0, 1, 2, 2, 2])
    assert tiny.grade(sample, [1, 2, 2, 2, 0])[0].correct  # an answer and its end
    assert tiny.grade(sample, [0, 1, 2, 2, 2])[0].correct  # position by position
    for first in (-1, 0.0, True, None, "0"):  # no bos
        assert not tiny.grade(sample, [first, 1, 2, 2, 2])[0].correct
    assert not tiny.grade(sample, [0, 2, 2, 2, 0])[0].correct
    assert tiny.grade(sample, [1, 1, 2, 0, 1])[0].correct


def test_short_sentences_have_no_cut(tiny):
    assert tiny.slices() == [{"from": "start"}]
    assert len(tiny.sample("test", 0, 0).queries) == 1


def test_explain(tiny):
    sample = tiny.read([0, 2, 2, 2, 1, 1])
    assert tiny.explain(sample, sample.queries[0]) == "root → b a; b (tokens 1-2) → 2 2; a (tokens 3-5) → 2 1 1"
    task = tasks.get("lano")
    sample = task.sample("test", 0, 0)
    first, *others = task.explain(sample, sample.queries[1]).split("; ")
    children = first.removeprefix("root → ").split()
    assert [step.split()[0] for step in others] == children
    assert others[-1].split(")")[0].endswith(f"-{len(sample.tokens) - 1}")


def test_a_grammar_of_one_level(tmp_path):
    (tmp_path / "flat.txt").write_text("root = 1 2 | 1 1 1")
    task = tasks.get("lano", grammar=str(tmp_path / "flat.txt"))
    assert task.max_len == 4
    sample = task.read([0, 1, 2])
    assert task.explain(sample, sample.queries[0]) == "root → 1 2"
    assert {task.vocab.show(task.sample("train", 0, i)) for i in range(30)} == {"bos 1 2", "bos 1 1 1"}


# -- chance -----------------------------------------------------------------------------------------------------------


def test_chance_bounds_random_strings(tiny):
    distribution = tiny.grammar.length_distribution
    exact = sum(distribution[n] * sum(len(s) == n for s in SENTENCES) / 2**n for n in range(len(distribution)))
    assert exact <= tiny.chance({"from": "start"}) <= 1
    rng = np.random.default_rng(0)
    draws = []
    for i in range(3000):
        sample = tiny.sample("test", 0, i)
        draws.append(tiny.grade(sample, [rng.integers(1, 3, len(sample.tokens) - 1)])[0].correct)
    assert np.mean(draws) == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 3000))


@pytest.mark.slow
def test_chance_from_the_cut(tmp_path):
    """49 to 54 fixed tokens and one of 1 … 4 choices: the tokens after token 50 can sometimes be guessed."""
    (tmp_path / "long.txt").write_text(f"root = a b | a a b\na = {' '.join(['1'] * 26)}\nb = 1 2 | 2 1 2\n")
    task = tasks.get("lano", grammar=str(tmp_path / "long.txt"))
    assert task.slices() == [{"from": "start"}, {"from": "cut"}]  # 28, 29, 54 or 55 tokens
    ends = {4: 2, 5: 2}  # 1 1 1 2 and 1 2 1 2 complete it in 4; 1 1 1 1 2 and 1 1 2 1 2 would in 5
    exact = sum(count / 2**m for m, count in ends.items()) / 2
    assert exact <= task.chance({"from": "cut"}) <= 1
    rng = np.random.default_rng(0)
    draws = []
    for i in range(4000):
        sample = task.sample("test", 0, i)
        if len(sample.queries) == 2:
            query = sample.queries[1]
            draws.append(task.grade(sample, [[], rng.integers(1, 3, query.stop - query.start)])[1].correct)
    assert len(draws) > 1500
    assert np.mean(draws) <= task.chance({"from": "cut"}) + 4 * 0.5 / np.sqrt(len(draws))


def test_chance_is_negligible_for_the_released_grammars():
    for name in RELEASED:
        task = tasks.get("lano", difficulty=name)
        assert 0 < task.chance({"from": "start"}) < 1.1e-20
        assert 0 < task.chance({"from": "cut"}) < 2.9e-10


# -- reading and refusing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ([], "position 0: expected bos, got the end"),
        ([1, 2, 1], "position 0: expected bos, got 1"),
        ([0], "position 1: the sentence is not complete"),
        ([0, 1, 2], "position 3: the sentence is not complete"),
        ([0, 1, 0, 2], "position 2: expected 1 … 2, got bos"),
        ([0, 1, 2, 7], "position 3: expected 1 … 2, got <7>"),
        ([0, 2, 2, 2, 2], "position 4: no sentence that starts like this goes on with 2"),
        ([0, 1, 2, 2, 2, 2, 2], "position 5: no sentence that starts like this goes on with 2"),
    ],
)
def test_no_sentences(tiny, tokens, line):
    with refused(f"...{line}..."):
        tiny.read(tokens)
    if tokens[:1] == [0]:
        with refused(f"...{line}..."):
            tiny.from_original(tokens[1:])


def test_bad_grammars_are_one_line(tmp_path):
    (tmp_path / "bad.txt").write_text("root = a a\na = 1\nb = 1\n")
    for grammar, line in (
        ("cfg3z", 'lano.grammar: unknown grammar "cfg3z". Did you mean "cfg3'),
        (str(tmp_path / "none.txt"), f"lano.grammar: there is no grammar file {tmp_path / 'none.txt'}"),
        (str(tmp_path), f"lano.grammar: there is no grammar file {tmp_path}"),
        (str(tmp_path / "bad.txt"), f"lano.grammar: {tmp_path / 'bad.txt'}, line 3: nothing leads from root"),
        ("", 'lano.grammar: unknown grammar ""'),
        ("my\0file.txt", "lano.grammar: "),
        (3, "lano.grammar: expected a string, got 3"),
    ):
        with refused(f"{line}..."):
            tasks.get("lano", grammar=grammar)


def test_a_file_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    task = tasks.get("lano", grammar="mine")
    (tmp_path / "mine").write_text("root = 1 2 | 2\n")  # a task keeps the rules, not the path
    again = tasks.get("lano", **task.spec.model_dump())
    assert again.grammar == task.grammar == Grammar.from_text(TINY)
    assert again.spec == task.spec
    assert len(repr(task)) < 90


def test_ragged_output_as_long_as_the_sample_is_wrong(tiny):
    sample = tiny.sample("test", 0, 0)
    output = [[[1], [2, 3]], *[1] * (len(sample.tokens) - 1)]
    assert not any(verdict.correct for verdict in tiny.grade(sample, output))

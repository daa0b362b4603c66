"""Grammars: the released nine by their published numbers, exact distributions by enumeration, files, random ones."""

from collections import Counter
from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from refusals import refused
from small_grammars import SMALL, trees

from canonlm.tasks.lano import RELEASED, Grammar
from canonlm.tasks.lano.grammar import FOLDER

#        sizes, rules, alternatives, mean, sd, shortest, longest, bits of a tree
TABLE = {
    "cfg3b": ((1, 3, 3, 3, 3, 3, 3), 32, {2}, 275.63, 41.71, 138, 432, 169.25),
    "cfg3i": ((1, 3, 3, 3, 3, 3, 3), 32, {2}, 308.09, 45.97, 114, 564, 186.94),
    "cfg3h": ((1, 3, 3, 3, 3, 3, 3), 39, {2, 3}, 236.38, 41.50, 97, 459, 204.78),
    "cfg3g": ((1, 3, 3, 3, 3, 3, 3), 48, {3}, 252.43, 53.01, 80, 729, 269.92),
    "cfg3f": ((1, 3, 3, 3, 3, 3, 3), 54, {3, 4}, 249.86, 69.38, 64, 729, 268.66),
    # the longest of cfg3j by its rules; a distribution in doubles is 0 beyond 2000 tokens
    "cfg3j": ((1, 3, 3, 3, 3, 3, 3, 3), 57, {3}, 543.93, 133.60, 128, 2052, 618.59),
    "cfg3k": ((1, 3, 3, 3, 3, 3, 3, 3), 68, {3, 4}, 516.31, 91.06, 132, 1458, 608.33),
    "cfg3e1": ((1, 3, 9, 27, 81, 27, 9), 444, {3}, 198.58, 46.81, 66, 557, 215.99),
    "cfg3e2": ((1, 3, 9, 27, 27, 9, 4), 228, {3}, 246.36, 55.90, 82, 645, 256.35),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_released_grammars(name):
    sizes, rules, alternatives, mean, sd, shortest, longest, bits = TABLE[name]
    grammar = Grammar.load(name)
    assert grammar.sizes == sizes
    every = [rows for level in grammar.rules for rows in level]
    assert sum(map(len, every)) == rules
    assert {len(rows) for rows in every} == alternatives
    assert {len(row) for rows in every for row in rows} == {2, 3}
    assert all(len({row for rows in level for row in rows}) == sum(map(len, level)) for level in grammar.rules)
    assert grammar.mean_len == pytest.approx(mean, abs=0.005)
    assert grammar.sd_len == pytest.approx(sd, abs=0.005)
    assert (grammar.min_len, grammar.max_len) == (shortest, longest)
    assert grammar.derivation_entropy == pytest.approx(bits, abs=0.005)
    assert grammar.length_distribution.sum() == pytest.approx(1, abs=1e-12)
    assert len(grammar.length_distribution) == longest + 1
    assert np.flatnonzero(grammar.length_distribution)[0] == shortest


def test_the_small_grammar_is_a_random_one():
    small = Grammar.load("small")
    drawn = Grammar.random(7, sizes=(1, 3, 3, 3, 3), alternatives=(2, 2), repeat_symbols=False)
    assert (small.sizes, small.rules) == (drawn.sizes, drawn.rules)
    assert (small.mean_len, small.min_len, small.max_len) == (44, 24, 72)


def test_there_are_nine_released_grammars():
    assert set(RELEASED) == set(TABLE)
    repeated = {
        name: sum(len({*row}) < len(row) for level in Grammar.load(name).rules for rows in level for row in rows)
        for name in TABLE
    }
    assert repeated["cfg3b"] == 0  # the only one that forbids a symbol twice in a rule
    assert min(count for name, count in repeated.items() if name != "cfg3b") == 19
    assert max(repeated.values()) == 47


def test_fraction_of_windows_that_are_too_short():
    share = {name: Grammar.load(name).longer_than(512) for name in TABLE}
    assert share.pop("cfg3j") == pytest.approx(0.516, abs=5e-4)
    assert share.pop("cfg3k") == pytest.approx(0.497, abs=5e-4)
    assert max(share.values()) < 5e-6
    j, k = Grammar.load("cfg3j"), Grammar.load("cfg3k")
    assert j.longer_than(768) == pytest.approx(0.074, abs=5e-4)
    assert k.longer_than(768) == pytest.approx(0.0034, abs=5e-5)
    assert j.longer_than(1024) == pytest.approx(1.1e-6, rel=0.05)
    assert k.longer_than(1024) == pytest.approx(2e-14, rel=0.25)
    assert j.longer_than(-1) == pytest.approx(1)
    assert j.longer_than(j.max_len) == 0


def test_shipped_grammars_are_readable_files():
    for name in RELEASED:
        if name == "cfg3e1":
            with pytest.raises(ValueError, match=r"cfg3e1.txt, line \d+: nothing leads from root .* to b\d"):
                Grammar.read(FOLDER / f"{name}.txt")
        else:
            assert Grammar.read(FOLDER / f"{name}.txt") == Grammar.load(name)


# -- exact distributions, against every tree of small grammars --------------------------------------------------------


@given(SMALL)
def test_distributions_by_enumeration(grammar):
    every = trees(grammar)
    distribution = Counter()
    for string, p in every:
        distribution[len(string)] += p
    assert grammar.length_distribution == pytest.approx(
        [float(distribution[n]) for n in range(max(distribution) + 1)], abs=1e-12
    )
    assert (grammar.min_len, grammar.max_len) == (min(distribution), max(distribution))
    mean = sum(n * p for n, p in distribution.items())
    assert grammar.mean_len == pytest.approx(float(mean))
    assert grammar.sd_len == pytest.approx(
        float(sum((n - mean) ** 2 * p for n, p in distribution.items())) ** 0.5, abs=1e-6
    )
    assert grammar.derivation_entropy == pytest.approx(-sum(float(p) * log2(p) for _, p in every), abs=1e-9)
    assert grammar.longer_than(2) == pytest.approx(float(sum(p for n, p in distribution.items() if n > 2)), abs=1e-12)


@given(SMALL)
def test_random_strings_are_bounded(grammar):
    """Against all sentences: how many there are of each length, and how many different ends of each length."""
    full, ends = grammar.random_strings
    every = [string for string, _ in trees(grammar)]
    sentences = {*every}
    for n in range(1, grammar.max_len + 1):
        strings = float(grammar.sizes[-1]) ** n
        assert full[n] * strings == pytest.approx(sum(len(string) == n for string in every))  # trees, exactly
        different = {string[-n:] for string in sentences if len(string) > n}
        assert (ends[n] if n < len(ends) else 0) * strings >= len(different) * (1 - 1e-9)


def test_random_strings_by_hand():
    """a has the sentences 1 1 and 1 2, so the language has 16 of 4 tokens out of 2^4; ends: 1 1, 1 2 and 1, 2 …"""
    grammar = Grammar("hand", (1, 1, 2), ((((0, 0),),), (((0, 0), (0, 1)),)))
    full, ends = grammar.random_strings
    assert full.tolist() == [0, 0, 0, 0, 4 / 16]
    # one token: 1 or 2 (in 2 alternatives); two: 11, 12; three: (1 or 2) before 11 or 12
    assert ends.tolist() == [0, 2 / 2, 2 / 4, 4 / 8]


# -- files ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**62), sizes=st.sampled_from([(1, 3, 3), (1, 2), (1, 4, 2, 5), (1, 3, 3, 3, 3, 3, 3)]))
def test_write_and_read(tmp_path_factory, seed, sizes):
    grammar = Grammar.random(seed, sizes=sizes, alternatives=(2, 2))
    path = tmp_path_factory.mktemp("grammars") / f"{grammar.name}.txt"
    grammar.write(path)
    assert Grammar.read(path) == grammar
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_by_hand(tmp_path):
    path = tmp_path / "english.txt"
    path.write_bytes(
        "\ufeff# my grammar\r\nS=NP VP|VP NP  # either way\r\n\r\n VP = 3 1\r\nNP = 1 2 | 2 | 02 2 1\r\n".encode()
    )
    grammar = Grammar.read(path)
    assert grammar.name == str(grammar) == "english"
    assert grammar.sizes == (1, 2, 3)
    assert grammar.symbols == (("S",), ("VP", "NP"), ("1", "2", "3"))  # the order of the lines
    assert grammar.rules == ((((1, 0), (0, 1)),), (((2, 0),), ((0, 1), (1,), (1, 1, 0))))
    assert (grammar.min_len, grammar.max_len) == (3, 5)
    again = tmp_path / "sub" / "english.txt"
    again.parent.mkdir()
    grammar.write(again)
    assert again.read_text() == "# english\nS = NP VP | VP NP\n\nVP = 3 1\nNP = 1 2 | 2 | 2 2 1\n"
    assert Grammar.read(again) == grammar


def test_levels_do_not_depend_on_the_order_of_lines(tmp_path):
    (tmp_path / "a.txt").write_text("root = x y\nc = 1 2\ny = c d | d d\nd = 2 2\nx = d c\n")
    grammar = Grammar.read(tmp_path / "a.txt")
    assert grammar.symbols == (("root",), ("y", "x"), ("c", "d"), ("1", "2"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", ": expected rules such as 'root = a b | b a', found none"),
        ("\n# nothing\n", ": expected rules such as"),
        (b"\xff\xfe\x00", ": expected a text file (UTF-8) with a grammar, got other bytes"),
        (b"root = 1 2\0", ": expected a text file (UTF-8)"),
        ("\x1ca\u2028b\x0bc", ", line 1: expected 'symbol = children | children', got 'a b c'"),
        ("root = a a\na", ", line 2: expected 'symbol = children | children', got 'a'"),
        ("a = 1 = 2", ", line 1: expected 'symbol = children"),
        ("a b = 1 2", ", line 1: expected 'symbol = children"),
        ("= 1 2", ", line 1: expected 'symbol = children"),
        ("a|b = 1 2", ", line 1: expected 'symbol = children"),
        ("x" * 500, ", line 1: expected 'symbol = children | children', got '" + "x" * 57 + "…'"),
        ("root = 1 2\n1 = 2 2", ", line 2: 1 is a number, so a terminal: it has no rules"),
        ("root = a a\n\na = 1\na = 2", ", line 4: a already has rules, in line 3"),
        ("root = a a |\na = 1", ", line 1: an alternative of root is empty"),
        ("root =", ", line 1: an alternative of root is empty"),
        ("root = 1 0", ", line 1: terminals are the numbers 1, 2, …; got 0"),
        ("root = 1 2 | 2 1 | 1  2", ", line 1: root has the alternative '1 2' twice"),
        ("root = a b\na = 1 2", ", line 1: b has no rules (only numbers are terminals)"),
        ("root = a a\na = 1 -2", ", line 2: -2 has no rules"),
        (
            "root = a 1\na = 1 2",
            ", line 1: 1 and a are on different levels (0 and 1 above the terminals), "
            "so they cannot both be children of root",
        ),
        ("root = a a | b b\na = 1 2\nb = a a", ", line 1: a and b are on different levels (1 and 2 above"),
        ("root = a a\na = b b\nb = a a", ", line 2: a leads back to itself; every rule must go one level down"),
        ("root = root 1", ", line 1: root leads back to itself"),
        ("root = a a\na = 1 2\nb = 1 1", ", line 3: nothing leads from root (the first symbol) to b"),
        ("a = 1 2\nroot = a a", ", line 2: nothing leads from a (the first symbol) to root"),
        ("root = 1 4 | 2 1", ": the terminals go up to 4, but 3 is in no rule"),
        ("root = 1 99999999999999999999", ": the terminals go up to 99999999999999999999, but 2 is in no rule"),
        (
            "\n".join(f"x{i} = x{i + 1} x{i + 1}" for i in range(17)) + "\nx17 = 1 1",
            ": its longest sentence has 262144 tokens, more than 65536",
        ),
        (
            "\n".join(f"x{i} = x{i + 1}" for i in range(30)) + "\nx30 = 1",
            ": sizes: expected 1 (the root) and the sizes of 1 to 27 more levels, got (1, 1,",
        ),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(tmp_path, content, line):
    path = tmp_path / "mine.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(f"{path}{line}..."):
        Grammar.read(path)


def test_no_such_grammar(tmp_path):
    with refused('...unknown grammar "cfg3z". Did you mean "cfg3..."? Grammars: cfg3b, cfg3e1...'):
        Grammar.load("cfg3z")
    with refused("...none.txt: cannot be read (No such file or directory)..."):
        Grammar.read(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (((2, 3), ()), "sizes: expected 1 (the root) and the sizes of"),
        (((1,), ()), "sizes: expected 1 (the root)"),
        (((1, 0), ((((0, 0),),),)), "sizes: expected 1 (the root)"),
        (((1, 2), ()), "rules: expected alternatives for (1,) symbols, got ()"),
        (((1, 2), (((),),)), "rules[0][0]: expected different rows of positions from 0 to 1, got ()"),
        (((1, 2), ((((),),),)), "rules[0][0]: expected different rows"),
        (((1, 2), ((((0, 2),),),)), "rules[0][0]: expected different rows"),
        (((1, 2), ((((0, -1),),),)), "rules[0][0]: expected different rows"),
        (((1, 2), ((((0, 1), (0, 1)),),)), "rules[0][0]: expected different rows"),
        (((1, 2), ((((0, 1),),),), (("root",), ("1",))), "symbols: expected (1, 2) names, got (1, 1)"),
    ],
)
def test_mistakes_in_python(parts, line):
    with refused(f"{line}..."):
        Grammar("mine", *parts)


# -- random grammars --------------------------------------------------------------------------------------------------


@st.composite
def knobs(draw):
    low, more = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    shortest, longer = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return {
        "sizes": (1, *draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))),
        "alternatives": (low, low + more),
        "lengths": (shortest, shortest + longer),
        "repeat_symbols": draw(st.booleans()),
        "repeat_rules": draw(st.booleans()),
    }


@given(st.integers(0, 2**63 - 1), knobs())
def test_random_grammars_respect_their_arguments(seed, knobs):
    try:
        grammar = Grammar.random(seed, **knobs)
    except ValueError:  # impossible ones have a test of their own
        assume(False)
    assert grammar.sizes == knobs["sizes"]
    for level, children in zip(grammar.rules, grammar.sizes[1:], strict=True):
        rows = [row for symbol in level for row in symbol]
        assert all(knobs["alternatives"][0] <= len(symbol) <= knobs["alternatives"][1] for symbol in level)
        assert all(knobs["lengths"][0] <= len(row) <= knobs["lengths"][1] for row in rows)
        assert knobs["repeat_symbols"] or all(len({*row}) == len(row) for row in rows)
        assert knobs["repeat_rules"] or len({*rows}) == len(rows)
        assert {child for row in rows for child in row} == {*range(children)}
    assert Grammar.random(seed, **knobs) == grammar


def test_random_grammars_vary(fits):
    grammars = [Grammar.random(seed, sizes=(1, 4, 4), alternatives=(2, 4)) for seed in range(600)]
    assert len({grammar.rules for grammar in grammars}) == 600
    lower = [rows for grammar in grammars for rows in grammar.rules[1]]  # too many rules to leave out a terminal
    fits([sum(len(rows) == k for rows in lower) for k in (2, 3, 4)])
    repeated = [row for rows in lower for row in rows if len({*row}) < len(row)]
    assert len(repeated) > 500
    shared = [Grammar.random(seed, sizes=(1, 4, 2), repeat_rules=True) for seed in range(50)]
    assert any(len({row for rows in g.rules[1] for row in rows}) < sum(map(len, g.rules[1])) for g in shared)


def test_settings_of_released_grammars_can_be_drawn():
    """The settings of all nine can be drawn."""
    for name, (sizes, _, alternatives, *_) in TABLE.items():
        pair = (min(alternatives), max(alternatives))
        grammar = Grammar.random(7, sizes=sizes, alternatives=pair, repeat_symbols=name != "cfg3b")
        assert grammar.sizes == sizes
        assert grammar.name == "random-7"


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"sizes": (2, 3)}, "sizes: expected 1 (the root) and the sizes of the other levels, got (2, 3)"),
        ({"sizes": (1, 0)}, "sizes: expected 1"),
        ({"alternatives": (0, 2)}, "alternatives: expected (min, max) with 1 <= min <= max, got (0, 2)"),
        ({"alternatives": (4, 3)}, "alternatives: expected (min, max)"),
        ({"lengths": (3, 2)}, "lengths: expected (min, max)"),
        ({"lengths": (2, 4), "repeat_symbols": False}, "lengths: expected at most 3 different symbols in"),
        ({"sizes": (1, 3, 2), "lengths": (2, 2)}, "alternatives: expected at most 1 (only 4 different ones exist"),
        (
            {"sizes": (1, 9, 180), "alternatives": (4, 4), "lengths": (5, 5)},
            "sizes: expected fewer symbols below a level of 9, or more alternatives, got 180",
        ),
        ({"sizes": (1, 3, 99)}, "sizes: expected at most 36 symbols below a level of 3, got (1, 3, 99)"),
        ({"seed": -1}, "seed: expected an integer"),
    ],
)  # fmt: skip
def test_impossible_arguments(knobs, line):
    with refused(f"{line}..."):
        Grammar.random(**{"seed": 0, **knobs})


def test_the_table_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "tasks" / "lano.md").read_text(encoding="utf-8")
    rows = [line.strip("| \n").split(" | ") for line in page.splitlines() if line.startswith("| cfg3")]
    assert [row[0] for row in rows] == [*RELEASED]
    for name, *numbers in rows:
        grammar = Grammar.load(name)
        assert numbers == [
            f"{len(grammar.rules)}",
            f"{sum(len(rows) for level in grammar.rules for rows in level)}",
            f"{grammar.mean_len:.1f}",
            f"{grammar.min_len} – {grammar.max_len}",
            f"{grammar.derivation_entropy:.1f}",
            f"{grammar.longer_than(512):.3f}",
        ]

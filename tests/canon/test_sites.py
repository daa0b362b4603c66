"""The grammar of Canon sites: every set of sites has one text, and every mistake one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm.canon.sites import SITES, VARIANTS, Variant, letters, parse, slots, write

LEARNED = st.builds(
    Variant,
    kernel=st.integers(1, 8),
    residual=st.booleans(),
    activation=st.booleans(),
    bias=st.booleans(),
    frozen=st.booleans(),
).filter(lambda v: not (v.frozen and v.start != "uniform"))
STARTED = st.builds(Variant, kernel=st.integers(1, 8), start=st.just("zero"), scaled=st.booleans())
IDENTITY = st.builds(Variant, kernel=st.integers(1, 8), residual=st.just(False), start=st.just("id"))
BY_FORM = {
    None: st.just(Variant()),  # at b
    "conv": LEARNED | STARTED | IDENTITY,
    "avg": st.builds(Variant, kernel=st.integers(1, 8), residual=st.booleans(), form=st.just("avg")),
    "dynamic": st.builds(Variant, kernel=st.integers(1, 8), scaled=st.booleans(), form=st.just("dynamic")),
    **{form: st.just(Variant(kernel=2, form=form)) for form in ("smear", "offset")},
}
BY_LETTER = {at.letter: st.one_of(*map(BY_FORM.__getitem__, at.forms or [None])) for at in SITES.values()}


@given(sites=st.fixed_dictionaries({}, optional=BY_LETTER), order=st.randoms())
def test_every_set_of_sites_has_one_spelling(sites, order):
    text = write(sites)
    assert parse(text) == sites
    groups = text.split(",")
    order.shuffle(groups)
    shuffled = ",".join("".join(order.sample(*[[*g.partition(":")[0]], len(g.partition(":")[0])])) + g[g.find(":") :]
                        if ":" in g else "".join(order.sample([*g], len(g))) for g in groups)  # fmt: skip
    assert write(parse(shuffled)) == text


@pytest.mark.parametrize(
    ("text", "canonical", "held"),
    [
        ("DCBA", "ABCD", "ABCD"),
        ("AbCD", "AbCD", "AbCD"),
        ("VQK", "B", "B"),
        ("KVOM:scaled", "KVOM:scaled", "BOM"),
        ("D:k3,A:zero", "A:zero,D:k3", "AD"),
        ("ABCDOME", "EABOCDM", "EABOCDM"),
        ("E:smear,K:offset", "E:smear,K:offset", "EB"),
        ("Q:k3,KV", "Q:k3,KV", "B"),
        ("A:nores:id", "A:id", "A"),
        ("", "", ""),
    ],
)
def test_spellings(text, canonical, held):
    assert (write(parse(text)), slots(parse(text))) == (canonical, held)


def test_groups_without_variants_equal_the_default():
    sites = parse("A:k2,D", default=Variant(kernel=3, bias=True))
    assert sites == {"A": Variant(kernel=2, bias=True), "D": Variant(kernel=3, bias=True)}
    assert write(sites, default=Variant(kernel=3, bias=True)) == "A:k2,D"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ABX", f'sites: expected letters out of {", ".join(letters())} (such as "ABCD" or "KVOM:scaled"), got "ABX"'),
        ("A,,B", "letters out of"),
        (":k3", "letters out of"),
        (3, 'letters such as "ABCD", got 3'),
        ("AA", 'A once, got "AA"'),
        ("A,B,A", 'A once, got "A,B,A"'),
        ("BK", 'K once (B is QKV), got "BK"'),
        ("A:k0", 'a kernel from :k1 to :k64, got "A:k0"'),
        ("A:k65", "a kernel from :k1 to :k64"),
        ("A:k2:k3", "one kernel, not also :k3"),
        ("A:zeor", 'unknown variant ":zeor". Did you mean ":zero"?'),
        ("A:nores:zero", ":zero without :nores"),
        ("A:zero:frozen", ":frozen without :zero and :id"),
        ("A:scaled:nores", ":scaled without :nores"),
        ("A:id:silu", ":id without :silu"),
        ("A:avg:bias", ":avg without"),
        ("A:avg:zero", ":avg without :zero"),
        ("K:dynamic:nores", ":dynamic without :nores"),
        ("A:dynamic", ":dynamic at Q, K, V only"),
        ("V:offset", ":offset at K only"),
        ("D:smear", ":smear at E, A, O, C, M"),
        ("A:smear:k3", "no other variant beside :smear"),
        ("Ab:k3", "no variant of b"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_variant_of_the_table_can_be_written():
    where = {"dynamic": "K", "offset": "K", "smear": "E"}
    for name in VARIANTS:
        text = f"{where.get(name, 'A')}:{name}"
        assert write(parse(text)) == text

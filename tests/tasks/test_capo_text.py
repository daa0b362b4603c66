"""A biography is read back by its own templates; sentences and subjects are where they should be."""

from capo_reader import order_and_templates
from capo_text import biography
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from canonlm.tasks.capo.people import person
from canonlm.tasks.capo.pools import ATTRIBUTES, load
from canonlm.tasks.capo.templates import TEMPLATES, split

POOLS = load()
people = st.integers(0, 10**8).map(lambda i: person(0, i, POOLS))
choices = st.tuples(*[st.integers(0, len(TEMPLATES[attribute]) - 1) for attribute in ATTRIBUTES])
orders = st.permutations(range(6))


@given(people, choices, orders, st.booleans())
def test_a_biography_reads_back_to_person_templates_and_order(who, templates, order, fullname):
    text = biography(who, templates, order, fullname=fullname)
    assert order_and_templates(text, who, fullname) == (list(order), list(templates))


def test_one_biography_letter_by_letter():
    who = person(0, 1, POOLS)
    first = [TEMPLATES[attribute][0] for attribute in ATTRIBUTES]
    assert first == [
        "{subject} was born on {value}.",
        "{subject} was born in {value}.",
        "{subject} studied at {value}.",
        "{subject} majored in {value}.",
        "{subject} works in {value}.",
        "{subject} works for {value}.",
    ]
    assert biography(who, [0] * 6) == (
        f" {who.name} was born on {who.birth_date}. She was born in {who.birth_city}. She studied at {who.university}."
        f" She majored in {who.field}. She works in {who.company_city}. She works for {who.company}."
    )
    assert biography(who, [0] * 6, [5, 4, 3, 2, 1, 0], fullname=True) == (
        f" {who.name} works for {who.company}. {who.name} works in {who.company_city}. {who.name} majored in"
        f" {who.field}. {who.name} studied at {who.university}. {who.name} was born in {who.birth_city}."
        f" {who.name} was born on {who.birth_date}."
    )


def test_a_byte_level_tokenizer_cuts_at_every_piece():
    """GPT-2's pattern splits the text only where it splits the pieces, so pieces can be tokenised alone."""
    cut = ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
    longest = max(map(len, TEMPLATES.values()))
    for i in range(3 * longest):  # every template, three times
        who, parts = person(1, i, POOLS), []
        for attribute in ATTRIBUTES:
            between, after = split(TEMPLATES[attribute][i % len(TEMPLATES[attribute])])
            parts += [f" {who.pronoun if parts else who.name}", between, f" {who.values[attribute]}", after]
        assert [word for word, _ in cut("".join(parts))] == [word for part in parts for word, _ in cut(part)]

"""Malformed samples of every task: one line that names the position, what was expected and what was there."""

import pytest
from refusals import refused, task_of

SAMPLES = {  # of a task and its settings: the message of each
    "arithmetic": {
        "bos = 1": "position 3: expected bos, 1 to 40 tokens of a formula, = and its value, got 3 tokens",
        "1 1 = 1": "position 0: expected bos, got 1",
        "bos + = 1": "position 1: expected a number, got +",
        "bos 1 1 1 = 1": "position 2: expected one of + - *, got 1",
        "bos 1 + = 1": "position 3: expected a number, got =",
        "bos 1 + 1 + 2": "position 4: expected =, got +",
        "bos 1 + 2 * 4 = 2": "position 7: expected 4, got 2",
    },
    "arithmetic brackets=true": {
        "bos 1 + 1 = 2": "position 2: expected a formula with brackets around every operation, got +",
        "bos ( 1 + 1 = 2": "position 5: expected the rest of a formula, got =",
        "bos ( 1 + 1 + 1 ) = 3": "position 5: expected a formula with brackets around every operation, got +",
        "bos ( ( 1 ) ) = 1": "position 5: expected a formula with brackets around every operation, got )",
        "bos - - 1 = 1": "position 2: expected a formula with brackets around every operation, got -",
        "bos - ( 1 ) = 4": "position 2: expected a formula with brackets around every operation, got (",
        "bos ( ) = 0": "position 2: expected a formula with brackets around every operation, got )",
        "bos 1 ) = 1": "position 2: expected a formula with brackets around every operation, got )",
        "bos ( - 1 ) = 1": "position 6: expected 4, got 1",
    },
    "automaton number=1": {
        "bos ans no": "position 3: expected bos, 1 to 32 symbols, ans and yes or no, got 3 tokens",
        "bos no ans no": "position 1: expected a symbol, got no",
        "bos a b b ans yes": "position 5: expected no, got yes",
    },
    "brevo N=5": {
        "": "position 0: expected bos, got the end",
        "bos": "position 1: expected edges between 3 to 5 different nodes, got 0",
        "bos w1 w2 query w2": "position 3: expected edges between 3 to 5 different nodes, got 2",
        "bos w1 w2 w1 w2": "position 3: the edge from w1 to w2 a second time",
        "bos w1 w2 w2 w3 w3 w1 query w1": "position 7: the edges before it form a cycle: w2 → w3 → w1 → w2",
        "bos w1 w2 w2 w3 w4 w4 query w3": "position 7: the edges before it form a cycle: w4 → w4",
        "bos w1 w2 query": "position 3: expected edges between 3 to 5 different nodes, got 2",
        "bos w1 query": "position 2: expected a name, got query",
        "bos w1 w2 w2 w3": "position 5: expected query, got the end",
        "bos w1 w2 w2 w3 query w1 ans w1 end": "position 6: w1 has no parent",
        "bos w1 w2 w2 w3 query w4 ans w4 end": "position 6: w4 has no parent",
        "bos w1 w2 w2 w3 query w2 w1 w2 end": "position 7: expected ans, got w1",
        "bos w1 w2 w2 w3 query w2 ans w1 w2": "position 8: no end token",
        "bos w1 w2 w2 w3 query w2 ans w2 w1 end": "position 8: w2 comes before its parent w1",
        "bos w1 w2 w2 w3 query w2 ans w1 w2 w3 end": "position 8: w3 is not an ancestor of w2",
        "bos w1 w2 w2 w3 query w3 ans w1 w3 end": "position 8: misses w2",
        "bos w1 w2 w2 w3 query w2 ans w1 w2 end w3": "position 11: expected nothing after the end token",
    },
    "copying N=6": {
        "bos x1 ans": "position 3: expected bos, 1 to 6 items, ans and the items again, got 3 tokens",
        "bos ans": "position 2: expected bos, 1 to 6 items, ans and the items again, got 2 tokens",
        "ans x1 ans x1": "position 0: expected bos, got ans",
        "bos x1 x1 ans x1 x1": "position 2: x1 a second time",
        "bos x1 x2 ans x1 x3": "position 5: expected x2, got x3",
        "bos x1 ans ans x1 x2": "position 2: expected an item, got ans",
    },
    "dictionary N=4 noise=0.2": {
        "k1 v1 k1 v1": "position 0: expected bos, got k1",
        "bos k1 v1": "position 3: expected 2 to 4 slots before it, got 1",
        "bos k1 v1 k1 v2": "position 4: expected v1, got v2",
        "bos k1 v1 k2 v2": "position 3: expected a key that came before, got k2",
        "bos k1 v1 n1 n2": "position 3: expected a key that came before, got n1",
        "bos k1 v1 n1 k1": "position 3: expected a key and its value, or noise, got n1",
        "bos k1 v1 k1": "position 3: expected a key and its value, or noise, got k1",
    },
    "dictionary N=4 key_length=2": {
        "bos k1 k1 v1 k1 k1 v1": "position 1: expected different tokens, got k1 k1",
    },
    "flipflop": {
        "bos w 1 r": "position 4: expected bos and 2 to 64 pairs, got 4 tokens",
        "bos w 1": "position 3: expected bos and 2 to 64 pairs, got 3 tokens",
        "w w 1 r 1": "position 0: expected bos, got w",
        "bos i 1 r 1": "position 1: expected w, got i",
        "bos w r r 1": "position 2: expected a bit, got r",
        "bos w 1 1 1 r 1": "position 3: expected w or r or i, got 1",
        "bos w 1 i 0": "position 3: expected r, got i",
        "bos w 1 i 0 r 0": "position 6: expected 1, got 0",
    },
    "induction N=8 triggers=3 shown=2": {
        "bos T1 w1 T1": "position 4: expected bos, 4 to 8 tokens, a trigger and its word, got 4 tokens",
        "w1 T1 w1 T2 w2 T1 w1": "position 0: expected bos, got w1",
        "bos T1 T2 w2 w1 T1 w1": "position 2: expected each trigger once, and before a word, got T2",
        "bos T1 w1 T1 w2 T1 w1": "position 3: expected each trigger once, and before a word, got T1",
        "bos T1 w1 w1 T2 T1 w1": "position 4: expected each trigger once, and before a word, got T2",
        "bos T1 w1 bos w2 T1 w1": "position 3: expected a word or a trigger, got bos",
        "bos T1 w1 w1 w2 T1 w1": "position 5: expected 2 triggers before it, got 1",
        "bos T1 w1 T2 w2 T3 w1": "position 5: expected a trigger of the row, got T3",
        "bos T1 w1 T2 w2 T2 w1": "position 6: expected w2, got w1",
    },
    "mqar": {
        "": "position 0: expected bos, n pairs, ask and the pairs again, got 0 tokens",
        "bos ask": "position 2: expected bos, n pairs, ask and the pairs again, got 2 tokens",
        "bos k1 v1 ask k1 v1 k1": "position 7: expected bos, n pairs, ask and the pairs again, got 7 tokens",
        "ask k1 v1 ask k1 v1": "position 0: expected bos, got ask",
        "bos v1 k1 ask k1 v1": "position 1: expected a key, got v1",
        "bos k1 k2 ask k1 k2": "position 2: expected a value, got k2",
        "bos k1 v1 k1 v2 ask k1 v2 k1 v2": "position 5: expected different keys and different values before it",
        "bos k1 v1 k2 v1 ask k1 v1 k2 v1": "position 5: expected different keys and different values before it",
        "bos k1 v1 ask k1 v2": "position 4: k1 v2 is not one of the pairs",
        "bos k1 v1 ask k2 v1": "position 4: k2 v1 is not one of the pairs",
        "bos k1 v1 k2 v2 ask k1 v1 k1 v1": "position 10: expected one question about every key",
    },
    "palindrome N=4": {
        "bos ans": "position 2: expected bos, the row, ans and its words, got 2 tokens",
        "bos x1 x2 ans x2": "position 5: expected bos, the row, ans and its words, got 5 tokens",
        "bos ans ans x2": "position 1: expected a word, got ans",
        "bos x1 x2 ans x1 x2": "position 4: expected x2, got x1",
    },
    "parity": {
        "bos ans even": "position 3: expected bos, 1 to 32 bits, ans and the answer, got 3 tokens",
        "1 0 ans odd": "position 0: expected bos, got 1",
        "bos 0 even ans odd": "position 2: expected a bit, got even",
        "bos 0 1 1 odd": "position 3: expected ans, got 1",
        "bos 0 1 ans even": "position 4: expected odd, got even",
    },
    "recall": {
        "k1 v1 ask k1 v1": "position 0: expected bos, got k1",
        "bos v1 k1 ask k1 v1": "position 1: expected a binding, noise or ask, got v1",
        "bos k1 v1": "position 3: expected ask, got the end",
        "bos ask": "position 1: expected bindings before it, to different values",
        "bos k1 v1 k2 v1 ask": "position 5: expected bindings before it, to different values",
        "bos k1 v1 k1 v2 ask": "position 5: expected 1 bindings before it, got 2",
        "bos n1 n1 k1 v1 ask": "position 5: expected 0 slots of noise before it, got 1",
        "bos k1 v1 ask k2 v1": "position 4: expected a question about one of the keys, got k2",
        "bos k1 v1 ask k1 v2": "position 5: expected v1, got v2",
        "bos k1 v1 k2 v2 ask k1 v1 k1 v1": "position 10: expected 2 questions, one about every key, and nothing...",
    },
    "recall space=2": {
        "bos k1 v1 ask k1 v1": "position 6: expected a question about one of the keys or filler, got the end",
    },
    "recall updates=1": {
        "bos k1 v1 k1 v2 ask k1 v1": "position 7: expected v2, got v1",
    },
    "recall grid=true": {
        "bos k1 v1 ask k1 v1": "position 1: expected a binding, noise or ask, got k1",
    },
    "recall levels=2": {
        "bos k1 k2 k2 k1 ask k1 v1": "position 6: expected a key that leads to a value by 2 bindings or fewer",
        "bos k1 k2 k2 v1 ask k1 k2": "position 6: expected a question about one of the keys, got k1",
        "bos k1 k2 k3 v1 ask k1 v1": "position 7: expected k2, got v1",
    },
    "selective N=4 items=2": {
        "bos n1 x2 ans ans x1 x2": "position 3: expected a word or noise, got ans",
        "bos n1 x2 n1 x1 ans x1 x2": "position 6: expected x2, got x1",
        "bos n1 x2 n1 ans x1 x2": "position 4: expected 2 words before it, got 1",
    },
    "stack": {
        "bos push s1": "position 3: expected bos and 1 to 64 operations, got 3 tokens",
        "push push s1 x1": "position 0: expected bos, got push",
        "bos s1 s1 x1": "position 1: expected push or pop, got s1",
        "bos push x1 x1": "position 2: expected a stack, got x1",
        "bos push s1 s1": "position 3: expected an element, got s1",
        "bos pop s2 x1": "position 1: expected push, as s2 is empty",
        "bos push s1 x1 push s1 x2 pop s1 x1": "position 9: expected x2, got x1",
    },
    "state group=Z3": {
        "bos ans g0": "position 3: expected bos, 1 to 32 elements, ans and the product, got 3 tokens",
        "g1 g1 ans g2": "position 0: expected bos, got g1",
        "bos ans g1 ans g2": "position 1: expected an element, got ans",
        "bos g1 g1 g2": "position 2: expected ans, got g1",
        "bos g1 g1 ans g1": "position 4: expected g2, got g1",
    },
    "state group=Z3 answers=every": {
        "bos ans": "position 2: expected bos, 1 to 32 elements, ans, got 2 tokens",
    },
    "state group=Z3 inputs=generators": {
        "bos g2 ans g2": "position 1: expected g0 g1, got g2",
    },
}
ORIGINALS = {  # in the token ids of the original releases
    "brevo N=9": {
        "9999 1 2 1 3 1 4 1 5 1 6 9997 6 9998 1 6 9998": "position 11: w1 has more than 4 parents or children",
        "9999 9996": "position 1: 9996 is not a token of brevo...",
    },
    "depo": {
        "": "position 0: expected bos, got the end",
        "9999": "position 1: expected 3 to 225 edges before the first query, got 0",
        "9998": "position 0: 9998 is not a token of depo...",
        "51": "position 0: expected bos, got w1.",
        "9999 51 52 52 53 53": "position 6: expected a name, got the end",
        "9999 51 52 52 53 53 1": "position 7: expected the rest of a name, got the end",
        "9999 51 52 52 53 53 51": "position 7: expected a query, got the end",
        "9999 51 52 51 53 53 51": "position 3: a second edge from 'w1.'",
        "9999 51 52 52 51 53 53 9001": "position 7: the edges before it do not form one cycle",
        "9999 51 52 52 53 53 53 9001": "position 7: the edges before it do not form one cycle",
        "9999 51 52 52 53 53 54 9001": "position 7: the edges before it do not form one cycle",
        "9999 1 2 51": "position 1: expected a name of 1 to 2 tokens, got 3",
        "9999 51 52 52 53 53 51 9001 54 9500 51": "position 8: 'w4.' is not on the cycle",
        "9999 51 52 52 53 53 51 9001 51 52": "position 9: expected ans, got w2.",
        "9999 51 52 52 53 53 51 9001 51 9500 53": "position 10: expected the answer 'w2.', got 'w3.'",
        "9999 51 52 52 53 53 51 9001 51 9500 52 51": "position 11: expected q1 … q8, got w1.",
        "9999 51 52 52 53 53 51 9009": "position 7: 9009 is not a token of depo...",
    },
    "mano": {
        "": "position 0: expected bos, got the end",
        "9999": "position 1: expected len1 … len10, got the end",
        "9999 110": "position 1: 110 is not a token of mano...",
        "9999 14": "position 1: expected len1 … len10, got ans1",
        "9999 10 5000 5000 5000 14 5000": "position 3: the expression ends too early for 1 operators",
        "9999 10 1 1 5000 14 5000": "position 5: the expression has more than 1 operators",
        "9999 10 1 14 5000 14 5000": "position 3: expected an operator or a value, got ans1",
        "9999 10 1 5001": "position 4: expected the rest of the expression, got the end",
        "9999 10 1 5001 5001 24 5002": "position 5: expected ans1, got ans2",
        "9999 10 1 5001 5001 14 9999": "position 6: expected a value, got bos",
        "9999 10 1 5001 5001 14 5003": "position 6: expected the value 2, got 3",
        "9999 10 1 5001 5001 14 5002 9999": "position 7: expected the end",
        "9999 10 4 5001 5001 14 5001": "position 2: 4 is not a token of mano...",
    },
    "mano ops=d modulus=7 L=1": {
        "9999 10 4 5003 5000 14 5002": "position 2: division by 0, which has no inverse modulo 7",
    },
}


@pytest.mark.parametrize(("label", "text"), [(label, text) for label in SAMPLES for text in SAMPLES[label]])
def test_malformed_samples(label, text):
    task = task_of(label)
    with refused(SAMPLES[label][text]):
        task.read([task.vocab.ids[name] for name in text.split()])


@pytest.mark.parametrize(("label", "ids"), [(label, ids) for label in ORIGINALS for ids in ORIGINALS[label]])
def test_malformed_originals(label, ids):
    with refused(ORIGINALS[label][ids]):
        task_of(label).from_original([*map(int, ids.split())])

"""Samples never change, so old runs can be repeated and reports compared. A digest that changes is a defect."""

import hashlib

import pytest

from canonlm import tasks

DIGESTS = {
    "arithmetic arithmetic-40": "950d52ae26681408",
    "arithmetic arithmetic-40-brackets": "e1a41708c1d0ff6e",
    "automaton automaton-12": "220abd5f49d38c18",
    "brevo brevo1-70": "ad9d0e31d2cd56e0",
    "brevo brevo2-30": "f11128945617f82a",
    "capo": "d17a6bbe7e47fe3a",
    "copying": "4cea38a34742c002",
    "copying copying-500": "03813f74220fbb05",
    "depo depo1-225": "ecdecf11f52cd415",
    "depo depo2-75": "b4f8d8d06440361f",
    "dictionary dictionary-32-fuzzy": "4d8cc32df8d1a2b2",
    "dictionary dictionary-64-noisy": "d30847a24d54d920",
    "flipflop flipflop-64": "aa69c5a37fd18408",
    "induction induction-256-rare": "ed881fa94040e1b2",
    "lano cfg3f": "2900e054acb27034",
    "lano cfg3k": "5ba1495c21ad021b",
    "mano mano-10": "d0602ab250ef14a0",
    "mqar mqar-16": "da207a4721e07a8f",
    "mqar mqar-64": "b0ea64f36f5ae09e",
    "palindrome palindrome-32": "7d32e17329d7aaf9",
    "parity parity-32": "f15b67b45bec2ab8",
    "recall recall-forgetting": "0f933dd683884566",
    "recall recall-fuzzy": "0278efdd8fb82290",
    "recall recall-grid": "65a2d9e04e5dcc3f",
    "recall recall-noisy": "a426da491fba1838",
    "recall recall-stacked": "10cca09b54ba4ac3",
    "selective selective-256": "6da34deba7185e8a",
    "stack stack-85": "968f599c8b0b7b5e",
    "state state-s5": "583e374d9187a73f",
    "state state-z60": "aee8b8a4957be51f",
}


def digest(name, spec):
    task, result = tasks.get(name, **spec), hashlib.sha256()
    for split in ("train", "valid", "test"):
        for seed, start in ((0, 0), (2**63 - 1, 12345)):
            for loss_on in ("answer", "all"):
                for part in task.windows(split, seed, start, 3, seq_len=500, loss_on=loss_on):
                    result.update(part.astype("<i4").tobytes())
            sample = task.sample(split, seed, start + 1)
            content = repr((sample.tokens.tolist(), sample.labels.tolist(), sample.meta))
            result.update(content.replace("question_start=", "asked=").encode())  # its name when digests were recorded
    return result.hexdigest()[:16]


@pytest.mark.parametrize("label", DIGESTS)
def test_windows_and_samples_match_the_recorded_digests(label):
    name, _, difficulty = label.partition(" ")
    spec = {"N": 60, "exposures": 3} if name == "capo" else {"difficulty": difficulty} if difficulty else {}
    assert digest(name, spec) == DIGESTS[label]

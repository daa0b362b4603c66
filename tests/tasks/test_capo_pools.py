"""Capo's pools and templates: those that we ship, and those of a user's folder."""

import re
from itertools import chain

import pytest
from capo_folders import write_pools
from refusals import refused

from canonlm.tasks.capo.pools import load


def test_our_entries_are_distinct_plain_and_unambiguous_in_a_text():
    pools = load()
    values = [pools.city, pools.university, pools.field, pools.company]
    for pool in [pools.first, pools.middle, pools.last, *values]:
        assert len(set(pool)) == len(pool)
    names = [*pools.first, *pools.middle, *pools.last]
    assert len(set(names)) == len(names)  # no name is in two of the three pools
    for entry in chain(names, *values, pools.company_city):
        # Letters at both ends, so that a tokenizer cuts an entry from the blank, comma or period around it; no period
        # inside, so that sentences can be told apart.
        assert re.fullmatch(r"[A-Z]([A-Za-z]|, |[ '&-])*[A-Za-z]", entry), entry
        assert "  " not in entry
    for name in names:
        assert re.fullmatch(r"[A-Z][a-z]{1,11}", name), name
    for city in {*pools.city, *pools.company_city}:
        assert re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)?, [A-Z]{2}", city), city


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_user_provided_folder(folder, end, last_end, mark):
    entries = {
        "first_name": ["Zoë", "Anna Lena"],
        "city": [" Óbidos ", "Lund, Scania", "St. Ives"],
        "company": ["Acme;Lund", "Brown, Ltd. ;  São Paulo", "C;Lund"],
    }
    for name, lines in entries.items():
        (folder / f"{name}.txt").write_bytes(mark + (end.join(lines) + end * last_end).encode())
    (folder / "job.txt").write_text("not ours to read\n\nx")
    pools = load(folder)
    assert pools.first == ("Zoë", "Anna Lena")
    assert pools.city == ("Óbidos", "Lund, Scania", "St. Ives")
    assert pools.company == ("Acme", "Brown, Ltd.", "C")
    assert pools.company_city == ("Lund", "São Paulo", "Lund")
    assert pools.sizes == (2, 1, 1, 3, 1, 1, 3)


NEEDED = "first_name.txt, middle_name.txt, last_name.txt, city.txt, university.txt, field.txt, company.txt"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("field", None, f"field.txt: No such file or directory; a folder of pools has {NEEDED}"),
        ("field", b"", "field.txt: expected one entry per line, got an empty file"),
        ("field", b" \r\n\n", "field.txt: expected one entry per line, got an empty file"),
        ("city", b"Lund\n\nRome\n", 'city.txt, line 2: expected an entry, got ""'),
        ("city", b"Lund\nRo\tme\n", r"city.txt, line 2: expected an entry, got 'Ro\tme'"),
        ("city", b"Lund\rRome\r", r"city.txt, line 1: expected an entry, got 'Lund\rRome'"),
        ("city", b"Lund\nRome\nLund\n", 'city.txt, line 3: "Lund" is already in line 1'),
        ("city", b"Lund\nRome\n\xff", "city.txt, line 3: not UTF-8"),
        ("company", b"A; X\nB\n", 'company.txt, line 2: expected a company and its city as "name; city", got "B"'),
        ("company", b"A; X\n;Y", 'company.txt, line 2: expected a company and its city as "name; city", got ";Y"'),
        ("company", b"A;", 'company.txt, line 1: expected a company and its city as "name; city", got "A;"'),
        ("company", b"A;X;Y", 'company.txt, line 1: expected a company and its city as "name; city", got "A;X;Y"'),
        ("company", b"A; X\nB; X\nA; Y\n", 'company.txt, line 3: "A" is already in line 1'),
    ],
)
def test_a_bad_folder_is_refused_in_one_line(folder, name, content, complaint):
    path = folder / f"{name}.txt"
    path.unlink() if content is None else path.write_bytes(content)
    with refused(f"{folder}/{complaint}"):
        load(folder)


@pytest.fixture
def folder(tmp_path):
    return write_pools(tmp_path, company="Only; One\n")

"""Capo's pools: the entries from which names, birth dates, cities, universities, fields and companies are drawn.

Ours have the sizes of the paper (arXiv 2512.17351, after Part 3.3 of the same series): 400 first, 400 middle and 1000
last names, 12 x 28 x 200 dates, 200 cities, 300 universities, 100 fields, 263 companies. Every entry is our invention.
Each company has one city, so the company determines the company city.

A user's pools are a folder with the same seven files, one entry per line (UTF-8; LF or CR LF, as in the original
release): first_name.txt, middle_name.txt, last_name.txt, city.txt, university.txt, field.txt, and company.txt with
lines "name; city". Other files in the folder are not read.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from canonlm.core.untrusted import read_bytes

ATTRIBUTES = ("birth date", "birth city", "university", "field", "company city", "company")  # order of the sentences

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
DAYS = range(1, 29)
YEARS = range(1900, 2100)

FILES = ("first_name", "middle_name", "last_name", "city", "university", "field", "company")  # + ".txt"; order of sizes

Sizes = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Pools:
    """The entries, each distinct inside its pool; company c is in company_city[c]."""

    first: tuple[str, ...]
    middle: tuple[str, ...]
    last: tuple[str, ...]
    city: tuple[str, ...]
    university: tuple[str, ...]
    field: tuple[str, ...]
    company: tuple[str, ...]
    company_city: tuple[str, ...]

    @property
    def sizes(self) -> Sizes:
        """(first, middle, last, city, university, field, company): what the samplers in people.py take."""
        pools = self.first, self.middle, self.last, self.city, self.university, self.field, self.company
        return tuple(map(len, pools))  # type: ignore[return-value]

    @property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Every value that an attribute can have, except the birth dates; a company city once per company."""
        pools = self.city, self.university, self.field, self.company_city, self.company
        return dict(zip(ATTRIBUTES[1:], pools, strict=True))


def load(folder: Path | None = None) -> Pools:
    """A folder's pools; None means our own. ValueError, with file and line, if an entry is invalid."""
    return _own_pools() if folder is None else _read(folder)


@cache
def _own_pools() -> Pools:
    return _read(Path(__file__).parent / "data" / "pools")


def _read(folder: Path) -> Pools:
    *pools, lines = (_lines(folder / f"{name}.txt") for name in FILES)
    for name, entries in zip(FILES, pools, strict=False):
        _refuse_repeats(folder / f"{name}.txt", entries)
    companies, cities = [], []
    for number, line in enumerate(lines, 1):
        company, _, city = map(str.strip, line.partition(";"))
        if not company or not city or ";" in city:
            raise _malformed(folder / "company.txt", number, 'a company and its city as "name; city"', line)
        companies.append(company)
        cities.append(city)
    _refuse_repeats(folder / "company.txt", companies)
    return Pools(*map(tuple, [*pools, companies, cities]))


def _lines(path: Path) -> list[str]:
    """The lines of a file, stripped; empty lines at the end do not count."""
    if not path.exists():
        needed = ", ".join(f"{name}.txt" for name in FILES)
        raise ValueError(f"{path}: No such file or directory; a folder of pools has {needed}")
    try:
        text = read_bytes(path).decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {error.object.count(10, 0, error.start) + 1}: not UTF-8") from None
    if not text:
        raise ValueError(f"{path}: expected one entry per line, got an empty file")
    lines = [line.strip() for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if not line or not line.isprintable():
            raise _malformed(path, number, "an entry", line)
    return lines


def _refuse_repeats(path: Path, entries: list[str]) -> None:
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if (before := seen.setdefault(entry, number)) != number:
            raise ValueError(f'{path}, line {number}: "{entry}" is already in line {before}')


def _malformed(path: Path, number: int, what: str, line: str) -> ValueError:
    shown = f'"{line}"' if line.isprintable() else repr(line)
    return ValueError(f"{path}, line {number}: expected {what}, got {shown}")

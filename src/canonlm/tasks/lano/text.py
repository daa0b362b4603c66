"""The file format of grammars: one line per symbol, written by hand or by `write`.

    # a comment
    root = a b | b b a        two alternatives, equally likely; the first symbol of the file is the root
    a = 1 2 | 2 1 1           numbers are terminals: 1, 2, … up to the highest in use
    b = 2 2

The levels follow from the rules; the order of the lines is the order of the symbols within their level.
"""

from itertools import count
from pathlib import Path

from canonlm.core.files import write_text
from canonlm.core.untrusted import read_bytes

MAX_BYTES = 2**24
"""Max bytes of a grammar, whose rules take some fifty times as much as Python objects."""

Symbol = str | int  # a terminal is a number
Parts = tuple[tuple[int, ...], tuple, tuple[tuple[str, ...], ...]]  # sizes, rules, names: as in `Grammar`


def default_symbols(sizes: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    inner = ((f"{chr(ord('a') + i)}{k}" for k in range(1, size + 1)) for i, size in enumerate(sizes[1:-1]))
    return (("root",), *map(tuple, inner), tuple(str(t) for t in range(1, sizes[-1] + 1)))


def write(path: Path, name: str, symbols: tuple[tuple[str, ...], ...], rules: tuple) -> None:
    lines = [f"# {name}"]
    for level, alternatives in enumerate(rules):
        for symbol, rows in zip(symbols[level], alternatives, strict=True):
            right = (" ".join(symbols[level + 1][child] for child in row) for row in rows)
            lines.append(f"{symbol} = {' | '.join(right)}")
        lines.append("")
    write_text(path, "\n".join(lines))


def read(path: Path, *, unreachable: bool = False) -> Parts:
    """(sizes, rules, names) of the grammar in a file. ValueError: one line, with the file and the line.

    unreachable: accept symbols that cannot be reached from the root.
    """
    return parse(content_of(path), str(path), unreachable=unreachable)


def content_of(path: Path) -> str:
    try:
        content = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        content = "\0"
    if "\0" in content:
        raise ValueError(f"{path}: expected a text file (UTF-8) with a grammar, got other bytes")
    return content


def parse(content: str, where: str, *, unreachable: bool = False) -> Parts:
    """As `read`, from text instead of a file. where: the name in errors."""
    rules, line_of = _lines(content, where)
    steps = _steps_above_terminals(where, rules, line_of)
    root = next(iter(rules))
    known, reachable = {root}, [root]
    for symbol in reachable:
        fresh = {child for row in rules[symbol] for child in row if isinstance(child, str)} - known
        known |= fresh
        reachable += fresh
    for symbol in rules:
        if symbol not in known and not unreachable:
            raise _mistake(where, line_of[symbol], f"nothing leads from {root} (the first symbol) to {symbol}")
    terminals = {child for rows in rules.values() for row in rows for child in row if isinstance(child, int)}
    if len(terminals) < (highest := max(terminals)):
        unused = next(t for t in count(1) if t not in terminals)
        raise ValueError(f"{where}: the terminals go up to {highest}, but {unused} is in no rule")

    levels: list[list[str]] = [[] for _ in range(steps[root])]
    for symbol in rules:
        levels[steps[root] - steps[symbol]].append(symbol)
    place: dict[Symbol, int] = {terminal: terminal - 1 for terminal in terminals}
    place |= {symbol: i for level in levels for i, symbol in enumerate(level)}
    numbered = tuple(
        tuple(tuple(tuple(place[child] for child in row) for row in rules[symbol]) for symbol in level)
        for level in levels
    )
    names = (*map(tuple, levels), tuple(str(terminal) for terminal in sorted(terminals)))
    return tuple(map(len, names)), numbered, names


def _mistake(where: str, line: int, what: str) -> ValueError:
    return ValueError(f"{where}, line {line}: {what}")


def _lines(content: str, where: str) -> tuple[dict[str, list[tuple[Symbol, ...]]], dict[str, int]]:
    """(the alternatives of each symbol, the line of each symbol), in the order of the file."""
    rules: dict[str, list[tuple[Symbol, ...]]] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(content.split("\n"), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        symbol, equals, right = (part.strip() for part in line.partition("="))
        if not equals or "=" in right or len(symbol.split()) != 1 or "|" in symbol:
            raise _mistake(where, number, f"expected 'symbol = children | children', got '{_short(line)}'")
        if symbol.isdecimal():
            raise _mistake(where, number, f"{symbol} is a number, so a terminal: it has no rules")
        if symbol in rules:
            raise _mistake(where, number, f"{symbol} already has rules, in line {line_of[symbol]}")
        rules[symbol], line_of[symbol] = [], number
        for part in right.split("|"):
            row = tuple(int(word) if word.isdecimal() else word for word in part.split())
            if not row:
                raise _mistake(where, number, f"an alternative of {symbol} is empty")
            if 0 in row:
                raise _mistake(where, number, "terminals are the numbers 1, 2, …; got 0")
            if row in rules[symbol]:
                raise _mistake(where, number, f"{symbol} has the alternative '{_short(part)}' twice")
            rules[symbol].append(row)
    if not rules:
        raise ValueError(f"{where}: expected rules such as 'root = a b | b a', found none")
    for symbol, rows in rules.items():
        for child in (child for row in rows for child in row):
            if isinstance(child, str) and child not in rules:
                raise _mistake(where, line_of[symbol], f"{child} has no rules (only numbers are terminals)")
    return rules, line_of


def _steps_above_terminals(where: str, rules: dict, line_of: dict[str, int]) -> dict[Symbol, int]:
    """The height of every symbol above the terminals. All children of a symbol must have the same height."""
    steps: dict[Symbol, int] = {child: 0 for rows in rules.values() for row in rows for child in row}
    steps = {child: 0 for child in steps if isinstance(child, int)}
    waiting = dict(rules)
    while ready := [s for s, rows in waiting.items() if all(child in steps for row in rows for child in row)]:
        for symbol in ready:
            children = sorted({child for row in waiting.pop(symbol) for child in row}, key=lambda c: (steps[c], str(c)))
            low, high = children[0], children[-1]
            if steps[low] < steps[high]:
                what = f"{low} and {high} are on different levels ({steps[low]} and {steps[high]} above the terminals)"
                raise _mistake(where, line_of[symbol], f"{what}, so they cannot both be children of {symbol}")
            steps[symbol] = steps[low] + 1
    if waiting:  # symbols without a height are on a cycle or above one: walk down to the cycle
        symbol, seen = next(iter(waiting)), set()
        while symbol not in seen:
            seen.add(symbol)
            symbol = next(child for row in waiting[symbol] for child in row if child in waiting)
        raise _mistake(where, line_of[symbol], f"{symbol} leads back to itself; every rule must go one level down")
    return steps


def _short(words: str) -> str:
    words = " ".join(words.split())
    return words if len(words) <= 60 else words[:57] + "…"

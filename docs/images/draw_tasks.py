"""Draws docs/images/tasks/*.svg, each from a real sample: `python docs/images/draw_tasks.py [TASK …]`."""

import sys
from itertools import groupby, pairwise
from math import cos, pi, sin
from pathlib import Path

import draw_sequences
from svg import BLUE, EDGE, GREEN, INK, LETTER, LINE, MUTED, ORANGE, WIDTH, Point, Sheet

from canonlm import tasks
from canonlm.tasks.capo import Capo
from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.tasks.lano import Grammar

FOLDER = Path(__file__).parent / "tasks"


def copying() -> Sheet:
    task = tasks.get("copying", N=7)
    sample = task.sample("test", 0, 0)
    sheet = Sheet("Copying: a list of items and its copy", "Say the list again, in the same order.")
    sheet.y += 100
    centres = sheet.tokens(task.show(sample), gap=12)
    start, n = sample.queries[0].start, sample.meta["n"]
    for i in range(n):
        (x, y), (to, _) = centres[1 + i], centres[start + i]
        sheet.arc((x, y - 16), (to, y - 18), GREEN, height=114)
    _below(sheet, centres[1 : n + 1], "read")
    _below(sheet, centres[start : start + n], "write", GREEN)
    return sheet


def mqar() -> Sheet:
    task = tasks.get("mqar", pairs=4, test_pairs=[4], keys=9, values=9)
    sample = task.sample("test", 0, 0)
    sheet = Sheet("MQAR: keys with values, and each key once more", "Each key came with a value. Which one?")
    sheet.y += 105
    centres = sheet.tokens(task.show(sample), gap=7)
    n = sample.meta["n"]
    for query in sample.queries:
        first = next(i for i in range(1, 2 * n, 2) if sample.tokens[i] == sample.tokens[query.question_start])
        (x, y), (to, _) = centres[first + 1], centres[query.start]
        sheet.arc((x, y - 16), (to, y - 18), GREEN, height=30 + 0.22 * (to - x))
    _below(sheet, centres[1 : 2 * n + 1], "read, pair by pair")
    _below(sheet, centres[2 * n + 2 :], "asked, in another order", GREEN)
    return sheet


def depo() -> Sheet:
    task = tasks.get("depo", N=7, K=3, M=2, name_vocab=30, max_name_len=1)
    sample = task.sample("test", 0, 0)
    query = sample.queries[1]
    name, answer = (task.vocab.name(sample.tokens[at]) for at in (query.question_start + 1, query.start))
    cycle, k = sample.meta["cycle"], query.slice["k"]
    sheet = Sheet(
        "Depo: a ring of names, and the name some steps ahead", "Follow the arrows: where are you after k steps?"
    )
    middle, radius = (WIDTH / 2, 208), 116
    places = {
        node: (middle[0] + 2 * radius * sin(2 * pi * i / len(cycle)), middle[1] - radius * cos(2 * pi * i / len(cycle)))
        for i, node in enumerate(cycle)
    }
    path = [cycle[(cycle.index(name) + step) % len(cycle)] for step in range(k + 1)]
    assert path[-1] == answer
    for node, after in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        if (node, after) not in pairwise(path):
            sheet.arrow(places[node], places[after], MUTED, cut=28)
    sheet.chain([places[node] for node in path], ORANGE, cut=28)
    for node, at in places.items():
        color = {name: BLUE, answer: GREEN}.get(node, INK)
        sheet.chip(at, node, color, strong=node in (name, answer))
    for i, (node, after) in enumerate(pairwise(path), 1):
        (x1, y1), (x2, y2) = places[node], places[after]
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        out = 20 / (((x - middle[0]) ** 2 + (y - middle[1]) ** 2) ** 0.5)
        sheet.text((x + out * (x - middle[0]), y + out * (y - middle[1]) + 5), str(i), color=ORANGE, bold=True)
    sheet.text((middle[0], middle[1] - 4), f"{k} steps after {name}", color=BLUE, bold=True)
    sheet.text((middle[0], middle[1] + 20), f"comes {answer}", color=GREEN, bold=True)
    sheet.y = 374
    _caption(sheet, "What the model reads: the arrows in random order, then questions; it writes the green names.")
    sheet.tokens(task.show(sample))
    return sheet


def mano() -> Sheet:
    task = tasks.get("mano", L=4, synonyms=False)
    sample = task.sample("test", 0, 0)
    expression = sample.meta["expression"].split()
    sheet = Sheet("Mano: an expression as a tree with the value of every part", "What is the value, modulo 23?")
    tree, rest = _expression(expression)
    assert not rest
    assert tree["value"] == sample.meta["value"]
    leaves = _place(tree, 0, 0)
    step = (WIDTH - 2 * EDGE) / leaves

    def at(node: dict) -> Point:
        return EDGE + (node["x"] + 0.5) * step, 92 + 66 * node["depth"]

    def draw(node: dict) -> None:
        for part in node["parts"]:
            sheet.line(at(node), at(part))
            draw(part)
        (x, y), top = at(node), node is tree
        width = sheet.chip((x, y), node["name"], BLUE if node["parts"] else INK)
        if node["parts"]:
            value = f"= {node['value']}"
            sheet.text((x + width / 2 + 8, y + 5), value, color=GREEN if top else MUTED, anchor="start", bold=top)

    draw(tree)
    sheet.y = 92 + 66 * _depth(tree) + 40
    _caption(sheet, "What the model reads: operator first, then its two parts. It writes the value, nothing else.")
    sheet.tokens(task.show(sample))
    return sheet


def brevo() -> Sheet:
    task = tasks.get("brevo", N=10)
    sample = task.sample("train", 0, 5294)  # small, and with nodes that are not ancestors
    parents, query, answer = (sample.meta[key] for key in ("parents", "query", "answer"))
    level: dict[str, int] = {}
    while len(level) < len(parents):
        level |= {
            name: 1 + max((level[parent] for parent in above), default=-1)
            for name, above in parents.items()
            if name not in level and all(parent in level for parent in above)
        }
    sheet = Sheet("Brevo: a graph of what comes before what", f"What must come before {query}, and in which order?")
    places: dict[str, Point] = {}
    for depth in range(max(level.values()) + 1):
        row = [name for name in sorted(level) if level[name] == depth]
        row.sort(key=lambda name: sum(places[parent][0] for parent in parents[name]) / max(1, len(parents[name])))
        for i, name in enumerate(row):
            places[name] = WIDTH / 2 + (i - (len(row) - 1) / 2) * 170, 96 + 72 * depth
    for child, above in parents.items():
        for parent in above:
            inside = child in answer
            sheet.arrow(places[parent], places[child], ORANGE if inside else LINE, cut=24, bold=inside)
    for name, (x, y) in places.items():
        color = BLUE if name == query else GREEN if name in answer else MUTED
        width = sheet.chip((x, y), name, color, strong=name in answer)
        if name in answer:
            sheet.text((x + width / 2 + 8, y + 5), str(answer.index(name) + 1), color=color, anchor="start", bold=True)
    sheet.y = 96 + 72 * max(level.values()) + 46
    _caption(
        sheet, "What the model reads: the arrows in random order, then the question. It writes the numbered nodes."
    )
    sheet.tokens(task.show(sample))
    return sheet


def lano() -> Sheet:
    levels = (1, 2, 2, 2)  # root; A, B; a, b; 1, 2
    rules = (((0, 1, 0), (1, 0)),), (((0, 1), (1, 0)), ((1, 1), (0, 1, 0))), (((0, 1), (1, 1, 0)), ((1, 0), (0, 0)))
    grammar = Grammar("small", levels, rules, (("S",), ("A", "B"), ("a", "b"), ("1", "2")))
    tree = grammar.sample("train", 0, 9)
    sheet = Sheet(
        "Lano: a sentence and the tree that a grammar grew it with",
        "Write sentences of a grammar that nobody explains.",
    )
    top, step = 82, 62
    sheet.text((EDGE, top + 5), "The rules (never shown)", size=13, color=MUTED, anchor="start")
    y = top + 30
    for level, symbols in enumerate(rules):
        for symbol, rows in zip(grammar.symbols[level], symbols, strict=True):
            right = " | ".join(" ".join(grammar.symbols[level + 1][child] for child in row) for row in rows)
            sheet.text((EDGE, y), f"{symbol} → {right}", size=13, anchor="start", mono=True)
            y += 22
    left, width = 232, WIDTH - EDGE - 232
    column = width / len(tree.tokens)
    nodes = [tree.nodes(level) for level in range(3)]
    nodes.append([(token - 1, i, i + 1) for i, token in enumerate(tree.tokens.tolist())])
    places = [
        [(left + column * (start + stop) / 2, top + step * level) for _, start, stop in row]
        for level, row in enumerate(nodes)
    ]
    for level in range(3):
        for (_, start, stop), at in zip(nodes[level], places[level], strict=True):
            for (_, inside, _), below in zip(nodes[level + 1], places[level + 1], strict=True):
                if start <= inside < stop:
                    sheet.line(at, below)
    for level, row in enumerate(nodes):
        for (symbol, _, _), at in zip(row, places[level], strict=True):
            sheet.chip(at, grammar.symbols[level][symbol], GREEN if level == 3 else ORANGE)
    sheet.y = top + step * 3 + 46
    _caption(sheet, "The model sees the last row only. It may write any sentence that the rules allow.")
    sheet.tokens([("bos", "marker"), *((str(token), "answer") for token in tree.tokens), ("bos", "marker")])
    return sheet


def capo() -> Sheet:
    task = Capo(Capo.Spec(N=1000))
    told = [task.sample("train", 0, 35, j) for j in (0, 1)]
    facts = told[0].meta
    sheet = Sheet(
        "Capo: a person, and two texts that tell the same facts", "How many facts can a model keep in its parameters?"
    )
    top, width = 76, 232
    values = [attribute for attribute in ATTRIBUTES if attribute in facts]
    sheet.box(EDGE, top, width, 50 + 44 * len(values), strong=True)
    sheet.text((EDGE + 14, top + 30), facts["name"], size=16, color=BLUE, anchor="start", bold=True)
    for i, attribute in enumerate(values):
        y = top + 60 + 44 * i
        sheet.text((EDGE + 14, y), attribute, size=12, color=MUTED, anchor="start")
        sheet.text((EDGE + 14, y + 18), facts[attribute], size=14, color=GREEN, anchor="start", bold=True)
    left, y = EDGE + width + 32, top + 6
    for sample, words in zip(told, ("told once …", "… and again, in other words and another order"), strict=True):
        sheet.text((left, y), words, size=13, color=MUTED, anchor="start")
        y = _running_text(sheet, task, sample, left, y + 24) + 36
    sheet.y = max(y - 26, top + 50 + 44 * len(values) + 26)
    _caption(sheet, "After training on many people: how much of the green does the model know? In bits per parameter.")
    sheet.y -= 14
    return sheet


# -- parts ------------------------------------------------------------------------------------------------------------


def _caption(sheet: Sheet, words: str) -> None:
    sheet.text((EDGE, sheet.y), words, size=13, color=MUTED, anchor="start")
    sheet.y += 14


def _below(sheet: Sheet, centres: list[Point], words: str, color: str = MUTED) -> None:
    """A bracket under some tokens of one row, with a word."""
    left, right, y = centres[0][0] - 16, centres[-1][0] + 16, centres[0][1] + 22
    sheet.path(f"M{left:g} {y:g} v5 H{right:g} v-5", color, head=False)
    sheet.text(((left + right) / 2, y + 22), words, size=13, color=color)
    sheet.y = max(sheet.y, y + 24)


def _running_text(sheet: Sheet, task: tasks.Task, sample: tasks.Sample, left: float, y: float) -> float:
    """The sample as text in lines, the answers in green. Returns where the last line stands."""
    size, x, told, stop = 12.5, left, "", 0
    letter = size * LETTER
    for role, run in groupby(role for _, role in task.show(sample)):
        stop += len(list(run))
        before, told = told, task.vocab.text(sample.tokens[:stop].tolist())
        blank = letter * (told[len(before)] == " ")  # none before a period
        for word in told[len(before) :].split() if role != "marker" else ():
            x += blank * (x > left)
            if x + letter * len(word) > WIDTH - EDGE:
                x, y = left, y + 19
            color = GREEN if role == "answer" else INK
            sheet.text((x, y), word, size=size, color=color, anchor="start", mono=True, bold=role == "answer")
            x, blank = x + letter * len(word), letter
    return y


def _expression(words: list[str]) -> tuple[dict, list[str]]:
    """The tree that starts with the first word, and the words after it."""
    name, *rest = words
    if name not in "+-*":
        return {"name": name, "value": int(name), "parts": []}, rest
    left, rest = _expression(rest)
    right, rest = _expression(rest)
    a, b = left["value"], right["value"]
    value = {"+": a + b, "-": a - b, "*": a * b}[name] % 23
    return {"name": name, "value": value, "parts": [left, right]}, rest


def _place(node: dict, x: float, depth: int) -> float:
    """Leaves side by side from x on, parents above the middle of their parts. Returns where the next leaf goes."""
    node["depth"] = depth
    if not node["parts"]:
        node["x"] = x
        return x + 1
    for part in node["parts"]:
        x = _place(part, x, depth + 1)
    node["x"] = (node["parts"][0]["x"] + node["parts"][-1]["x"]) / 2
    return x


def _depth(node: dict) -> int:
    return max([node["depth"], *map(_depth, node["parts"])])


DRAWINGS = {drawing.__name__: drawing for drawing in (brevo, capo, copying, depo, lano, mano, mqar)}
DRAWINGS |= draw_sequences.DRAWINGS

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWINGS:
        (FOLDER / f"{name}.svg").write_text(DRAWINGS[name]().svg(), encoding="utf-8")

"""Damage to an untrusted file. Each line of a table is one kind of damage.

`JUNK` replaces a value in YAML, JSON, JSON lines or the header of safetensors. `CONTENTS` replaces a whole file.
`PLACES` replaces a file by something that is not one. `BYTES` changes some bytes.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy], Any]


class Pickled:
    def __reduce__(self) -> tuple:
        return os.system, ("touch pwned",)


def _zipped_pickle() -> bytes:
    """A pickle in the format of torch.save."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Pickled()))
        archive.writestr("archive/version", "3")
    return content.getvalue()


DEEP = 3_000

JUNK = [
    # numbers
    "0", "-1", "1", "2", "3", "0.5", "1.5", "1e308", "-1e308", "1e-320", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "1" + "0" * 20, "1" + "0" * 400, "9" * 5000, "NaN", ".nan", "Infinity", "-.inf",
    "-0.0", "1e999",
    # nothing, and what looks like it
    "null", "~", '""', '" "', "{}", "[]", "[[]]", '{"": null}', "true", "false",
    # texts
    '"a"', '"llama"', '"3e-3x"', '"yes"', '"2024-01-01"', "2024-01-01", '"\\u001b[31mred"', '"\\u0000"', '"\\ud800"',
    '"\\u202e"', '"a\\nb"', '"%s%n"', '"<script>alert(1)</script>"', '"' + "x" * 100_000 + '"', '"{0.__class__}"',
    # places
    '"/etc/passwd"', '"../../etc/passwd"', '"/dev/zero"', '"/proc/self/mem"', '"../x"', '"."', '"/"', '"~"',
    # names of code and of models
    '"hf:evil/model"', '"os:system"', '"antigravity:fly"', '"mine.py:Block"', '"fla:gla"', '"hf:llama"', '"bytes"',
    # what holds more
    "[1, 2]", '{"a": 1}', '[{"a": [1]}]', '[null]', '[""]', '{"name": "depo"}', "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP, "[" + "1," * 50_000 + "1]",
]  # fmt: skip
"""Raw text of JSON, which is also YAML, with few exceptions."""

JUNK_YAML = [
    "!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.system", "!!int x", "!!binary x",
    "!!set {a, b}", "&a [*a]", "*nothing", "&a {<<: *a}", "<<", "!!timestamp 99", "10:13", "0x1F", "1_000",
    "!!float '1e3'", "? [1]", "!x y",
]  # fmt: skip
KEYS = ["", "a", "__class__", "0", "x" * 10_000, "\x1b[2J", "a.b", "<<", "name", "\ud800", "../x", "on"]

ANCHORS = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))

CONTENTS: dict[str, Callable[[], bytes]] = {
    "an empty file": lambda: b"",
    "null bytes": lambda: bytes(5_000),
    "a pickle": lambda: pickle.dumps(Pickled()),
    "a pickle in a zip": _zipped_pickle,
    "deep brackets": lambda: b"[" * 100_000,
    "deep braces": lambda: b'{"a":' * 100_000,
    "deep dashes": lambda: b"- " * 20_000,
    "deep lines": lambda: b"".join(b" " * depth + b"a:\n" for depth in range(1_500)),
    "a line break": lambda: b"\n",
    "null": lambda: b"null",
    "a number": lambda: b"7",
    "a list": lambda: b"[1, 2]",
    "an empty object": lambda: b"{}",
    "a text": lambda: b'"text"',
    "not UTF-8": lambda: b"\xff\xfe\x00a\xd8",
    "a line of megabytes": lambda: b'{"text": "' + b"x" * 20_000_000,
    "anchors that multiply": lambda: ANCHORS.encode(),
    "a gzip bomb": lambda: gzip.compress(bytes(200_000_000), 9),
    "half a gzip": lambda: gzip.compress(os.urandom(1_000))[:700],
    "a zip": lambda: b"PK\x05\x06" + bytes(18),
    "a huge header": lambda: (2**62).to_bytes(8, "little") + b"{}",
    "a header of nothing": lambda: (2).to_bytes(8, "little") + b"{}",
    "parquet's ends": lambda: b"PAR1" + bytes(100) + b"PAR1",
    "YAML of Python": lambda: b"!!python/object/apply:os.system ['touch pwned']\n",
}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**35)


SPARSE = "32 GB of nothing"

PLACES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a FIFO": _fifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a file elsewhere": lambda path: path.symlink_to("/etc/passwd"),
    "a link to its folder": lambda path: path.symlink_to("."),
    SPARSE: _sparse,
}

BYTES: dict[str, Callable[[bytes, Draw], bytes]] = {
    "a flipped bit": lambda old, draw: _flipped(old, draw, 1),
    "twenty flipped bits": lambda old, draw: _flipped(old, draw, 20),
    "a flipped bit at the beginning": lambda old, draw: _flipped(old[:200], draw, 1) + old[200:],
    "cut": lambda old, draw: old[: draw(st.integers(0, max(0, len(old) - 1)))],
    "the last byte lost": lambda old, draw: old[:-1],
    "grown by a byte": lambda old, draw: old + b"\0",
    "grown by random bytes": lambda old, draw: old + draw(st.binary(min_size=1, max_size=50)),
    "twice": lambda old, draw: old + old,
    "other bytes": lambda old, draw: draw(st.binary(max_size=200)),
    "a byte order mark": lambda old, draw: b"\xef\xbb\xbf" + old,
    "lines end as on Windows": lambda old, draw: old.replace(b"\n", b"\r\n"),
}


def _flipped(old: bytes, draw: Draw, count: int) -> bytes:
    new = bytearray(old)
    for _ in range(count if old else 0):
        place = draw(st.integers(0, len(old) - 1))
        new[place] ^= 1 << draw(st.integers(0, 7))
    return bytes(new)


EVIL = "open('pwned', 'w').close()\n"
CODE: dict[str, list[tuple[str, Any]]] = {
    "config.yaml": [
        ("arch", "evil.py:Block"), ("arch", "run/evil.py:Block"), ("arch", "evil:Block"), ("arch", "os:system"),
        ("task", {"name": "evil.py:Task"}), ("task", {"name": "run/code/evil.py:Task"}), ("task", {"name": "this:s"}),
        ("on_checkpoint", "touch pwned"), ("on_checkpoint", ["touch", "pwned"]), ("track", ["evil.py:Tracker"]),
    ],
    "config.json": [
        ("auto_map", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}), ("model_type", "evil"),
        ("architectures", ["evil.Model"]), ("quantization_config", {"quant_method": "evil"}), ("_name_or_path", "/etc"),
    ],
    "tokenizer_config.json": [
        ("auto_map", {"AutoTokenizer": ["evil.Words", None]}), ("tokenizer_class", "evil.Words"),
        ("chat_template", "{% for x in range(10**9) %}{% endfor %}"), ("tokenizer_class", "LlamaTokenizer"),
    ],
    "mine.yaml": [
        *(("match", arm) for arm in ("evil.py:Block", "evil:Block+canon", "os:system")),
        *(("micro", [{"settings": ["copying-micro"], "arms": ["llama", "llama+canon", arm]}])
          for arm in ("evil.py:Block", "evil:Block+canon", "this:s")),
    ],
    "data.json": [("text.sources.web.path", {"folder": "/etc"}), ("text.sources.web.path", {"folder": "/proc/self"})],
    "index.json": [("splits", {"train": [{"name": "/etc/passwd"}]}), ("tokenizer", "../../etc/passwd")],
    "manifest.json": [("files", {"/etc/passwd": {"size": 1, "sha256": "0"}}), ("files", {"../../config.yaml": {}})],
    "results.json": [("results", [{"suite": "playground", "name": "copying", "settings": {}, "scores": [], "answers": {
        "file": file, "count": 1, "sha256": "0" * 64}}]) for file in ("/etc/passwd", "../../config.yaml", "a\0b", 3)],
    "play.json": [("sections", [{"id": "a", "runs": ["../../..", "/etc"]}]), ("command", "\x1b]0;pwned\x07")],
}  # fmt: skip
"""By file name: keys that refer to code or to another file, and values that a stranger may write. The code is in
evil.py, in the folder and in its code/, where a run has copies."""


@dataclass(frozen=True)
class Damage:
    """A description of the damage, and the damaged files (paths in the folder)."""

    kind: str = "none"
    words: str = ""
    files: tuple[str, ...] = ()


def apply(folder: Path, file: str, others: list[str], draw: Draw) -> Damage:
    """Damage a file of a folder; `others` are files that it may be swapped with."""
    path, files = folder / file, (file,)
    kinds = ["bytes", "bytes", "content", "place", "guests", *(["swap"] if others else [])]
    if inner := list(Path(file).parents)[:-2]:  # folders in the one that the command names
        kinds += ["linked"]
    if path.suffix in {".yaml", ".json", ".jsonl", ".safetensors"}:
        kinds += ["value"] * 8
    if path.name in CODE:
        kinds += ["code"] * 3
    kind = draw(st.sampled_from(kinds))
    if kind == "bytes":
        name = draw(st.sampled_from(sorted(BYTES)))
        path.write_bytes(BYTES[name](path.read_bytes(), draw))
    elif kind == "content":
        name = draw(st.sampled_from(sorted(CONTENTS)))
        path.write_bytes(CONTENTS[name]())
    elif kind == "place":
        name = draw(st.sampled_from(sorted(PLACES)))
        path.unlink()
        PLACES[name](path)
    elif kind == "guests":
        name = "links and a FIFO with names of temporary files"
        for number, place in enumerate([path.parent, folder]):
            (place / f".{path.name}.tmp-{number}-stranger").symlink_to("/etc/passwd")
            (place / f".{path.parent.name}.tmp-{number}-stranger").symlink_to("/etc")
            os.mkfifo(place / f".x.tmp-{number}-stranger")
    elif kind == "linked":
        place = folder / draw(st.sampled_from(sorted(map(str, inner))))
        name = f"{place.name} is a link to a folder elsewhere"
        elsewhere = folder.parent / "elsewhere"
        shutil.rmtree(elsewhere, ignore_errors=True)
        shutil.move(place, elsewhere)
        place.symlink_to(elsewhere)
    elif kind == "swap":
        other = draw(st.sampled_from(others))
        name, files = f"swapped with {other}", (file, other)
        shutil.move(path, path.with_name("swapping"))
        shutil.move(folder / other, path)
        shutil.move(path.with_name("swapping"), folder / other)
    elif kind == "code":
        name = _code(path, draw)
    else:
        name = _value(path, draw)
    return Damage(kind, name, files)


def _code(path: Path, draw: Draw) -> str:
    for place in (path.parent, path.parent / "code"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(EVIL)
    key, value = draw(st.sampled_from(CODE[path.name]))
    tree = yaml.safe_load(path.read_text())  # JSON, too
    path.write_text(json.dumps({**tree, key: value}))
    if path.name == "config.yaml" and (name := value if key == "arch" else isinstance(value, dict) and value["name"]):
        stamp = {str(name): hashlib.sha256(EVIL.encode()).hexdigest()}
        (path.parent / "code.json").write_text(json.dumps({"outside": stamp}))
    return f"{key}: {value}"


def _value(path: Path, draw: Draw) -> str:
    """Change a value, a key or the order of a file that holds a tree of values."""
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header, name = _changed(json.loads(content[8 : 8 + size]), draw, JUNK)
        raw = header.encode()
        raw += b" " * (-len(raw) % 8)
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        number = draw(st.integers(0, len(lines) - 1))
        lines[number], name = _changed(json.loads(lines[number]), draw, JUNK)
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        name = f"line {number + 1}, {name}"
    elif path.suffix == ".json":
        text, name = _changed(json.loads(path.read_text()), draw, JUNK)
        path.write_text(text, errors="surrogatepass")
    else:
        text, name = _changed(yaml.safe_load(path.read_text()), draw, JUNK + JUNK_YAML)
        path.write_text(text, errors="surrogatepass")
    return name


def _changed(tree: Any, draw: Draw, junk: list[str]) -> tuple[str, str]:
    """The text of a tree with one change, and the change in words: `train.steps: junk -1`."""
    where, owner, key = draw(st.sampled_from(list(_nodes(tree)))) if tree else ("", None, None)
    change = draw(st.sampled_from(["replaced", "replaced", "replaced", "lost", "doubled", "added"]))
    mark, text = "\x00 stands for junk \x00", ""
    if owner is None:
        return draw(st.sampled_from(junk)), "another value altogether"
    if change == "replaced":
        text = draw(st.sampled_from(junk))
        owner[key] = mark
    elif change == "lost":
        del owner[key]
    elif change == "added" and isinstance(owner, dict):
        text, name = draw(st.sampled_from(junk)), draw(st.sampled_from(KEYS))
        owner[name] = mark
        where = f"{where}: added {name[:20]!r}"
    elif isinstance(owner, list):
        owner.append(owner[key])
    dumped = json.dumps(tree).replace(json.dumps(mark), text)
    if change == "doubled" and isinstance(owner, dict):  # a dictionary cannot have a key twice
        own = json.dumps(owner)
        twice = own[:-1] + f", {json.dumps(key)}: {draw(st.sampled_from(junk))}" + "}"
        dumped = dumped.replace(own, twice, 1)
    return dumped, f"{where} {change} {text[:60]}".strip()


def _nodes(tree: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, the dictionary or list, the key in it) of every value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        place = f"{where}.{key}" if where else str(key)
        yield place, tree, key
        yield from _nodes(value, place)

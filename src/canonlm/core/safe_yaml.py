"""Reads YAML for recipes and run folders: plain values by YAML 1.2, with bounded size and nesting.

With the library's default, YAML 1.1, 10:13 would be 613 (minutes and seconds), 3e-3 a string, 010 eight, `no` false
and 2024-01-01 a date.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from canonlm.core.untrusted import MAX_DEPTH, MAX_DIGITS, own_file, read_text

MAX_BYTES = 2**20
"""Max bytes of a file."""

MAX_NODES = 100_000
"""Max values of a file, with aliases expanded."""

MERGE = "tag:yaml.org,2002:merge"

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if available: ten times as fast


class _Loader(_Base):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def read_yaml(path: Path) -> tuple[Any, yaml.Node | None]:
    """The value of a file and its nodes, which have line numbers. One-line ValueError with the name of the file."""
    if path.name == "config.yaml":  # of a run
        path = own_file(path)
    return parse_yaml(read_text(path, MAX_BYTES), str(path))


def parse_yaml(text: str, place: str) -> tuple[Any, yaml.Node | None]:
    """As `read_yaml`, for a text; `place` begins the error message."""
    try:
        _check_depth(text, place)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is not None and _count(node, place, {}) > MAX_NODES:
                raise _Refused(f"{place}: expected at most {MAX_NODES:,} values (aliases count as what they stand for)")
            return None if node is None else loader.construct_document(node), node
        finally:
            loader.dispose()
    except _Refused as error:
        raise ValueError(str(error)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ValueError(f"{place}{line}: not YAML: {reason}") from None
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError) as error:
        # The library raises these for values that do not fit their tag, such as `!!int x`.
        raise ValueError(f"{place}: not YAML: {str(error)[:100]}") from None


class _Refused(Exception):
    pass


def _check_depth(text: str, place: str) -> None:
    """Check nesting in the stream of events: the functions that make the nodes are recursive, and those of libyaml
    crash the process when they overflow the stack."""
    depth = 0
    event: Any
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise _Refused(f"{place}, line {line}: expected at most {MAX_DEPTH} levels of nesting")
        long = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > MAX_DIGITS
        if long and re.fullmatch(r"[-+]?[0-9]+|0x[0-9a-fA-F]+", event.value):
            line = event.start_mark.line + 1
            raise _Refused(f"{place}, line {line}: a number of {len(event.value):,} digits")


def _count(node: yaml.Node, place: str, counts: dict[int, int]) -> int:
    """The number of values in a node. `counts`: by node id; 0 while the node's values are being counted."""
    if id(node) in counts:
        if not (count := counts[id(node)]):
            line = node.start_mark.line + 1
            raise _Refused(f"{place}, line {line}: expected values that do not contain themselves")
        return count
    counts[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    nodes = [each for part in parts for each in part] if isinstance(node, yaml.MappingNode) else parts
    first: dict[tuple[str, str], int] = {}  # of two equal keys the library would take the last one without a word
    for key in nodes[::2] if isinstance(node, yaml.MappingNode) else []:
        line, name = key.start_mark.line + 1, (key.tag, str(key.value))
        if name in first and key.tag != MERGE:
            raise _Refused(f"{place}, line {line}: {key.value} appears twice (first in line {first[name]})")
        first[name] = line
    counts[id(node)] = count = min(1 + sum(_count(each, place, counts) for each in nodes), MAX_NODES + 1)
    return count

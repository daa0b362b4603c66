"""One page to look into results: what Canon layers change, every model, curves, compute, synthetic tasks, settings.

`payload` says what stands in it; a section is an HTML file and the script of its name, on `core.js`. The page holds
everything that it needs, and opens from disk.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ...files import write_text
from .. import template
from ..markup import bullets, escape, inert
from ..published.tables import NORM, ROPE, notes
from ..theme import DARK, LOOKS, MUTED
from .payload import Shown, beside_the_published, of_runs, payload

__all__ = ["Shown", "beside_the_published", "explorer", "of_runs", "payload", "write_results"]

ABOUT = (
    "The 64 language models released with <i>Physics of Language Models, Part 4</i> (Llama, GLA, Gated DeltaNet and "
    "Mamba2 of 1B to 8B parameters, with and without Canon layers), open models beside them, and the tables of the "
    "paper (arXiv 2512.17351)."
)
SECTIONS = ("overview", "models", "curves", "compute", "grids", "settings")


def write_results(shown: Shown, out: str | Path, title: str = "Published results") -> Path:
    """Write the page; it appears in one piece. OSError where the file cannot be written."""
    out = Path(out)
    write_text(out, render(shown, title))
    return out


def render(shown: Shown, title: str) -> str:
    body, data, script, css = explorer(shown)
    left_out = bullets(f"{entry.name}: {entry.reason}" for entry in shown.left_out) or "<p>Nothing.</p>"
    main = (
        f"<main class=explorer><header><h1>{escape(title)}</h1><p class=sub>{ABOUT}</p></header>\n{body}"
        f"<section><h2>What was left out</h2>{left_out}"
        "<noscript><p>This page needs JavaScript.</p></noscript></section></main>"
    )
    return template.page(escape(title), main, {"results-data": data}, [script], css)


def explorer(shown: Shown, sections: Sequence[str] = SECTIONS) -> tuple[str, str, str, str]:
    """Its sections as HTML, its data as JSON, its script and its style. A section without data hides itself."""
    read = {path.name: path.read_text("utf-8") for path in files(__package__).iterdir() if path.is_file()}
    told = "".join(f"<p>{escape(str(note))}</p>" for note in notes({ROPE, NORM}, several=True))
    body = "\n".join(read[f"{name}.html"] for name in ("bar", *sections)).replace("{notes}", told)
    script = "\n".join(read[f"{name}.js"] for name in ("core", *SECTIONS, "start"))
    return body, inert(json.dumps(payload(shown), allow_nan=False)), script, _css(read)


def _css(read: dict[str, str]) -> str:
    """With a variable for each colour of a look, which changes on a dark page."""
    colors = {MUTED, *(look.color for look in LOOKS.values())}
    light = "".join(f"--c{color[1:]}: {color}; " for color in sorted(colors))
    dark = "".join(f"--c{color[1:]}: {DARK[color]}; " for color in sorted(colors))
    return f":root {{ {light}}} @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n{read['explorer.css']}"

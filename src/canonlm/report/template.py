"""The page around the numbers: style and scripts, as text. Nothing in it is loaded from anywhere."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from plotly.offline import get_plotlyjs

from .theme import DARK, FONT, GRID, INK, MUTED, PAPER

CSS = f"""
:root {{ --ink: {INK}; --muted: {MUTED}; --grid: {GRID}; --paper: {PAPER}; --wash: #f5f6f8; --bar: #dbe8f3;
  --link: #0062a3; color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: {DARK[INK]}; --muted: {DARK[MUTED]}; --grid: {DARK[GRID]};
  --paper: {DARK[PAPER]}; --wash: #1c2125; --bar: #23394c; --link: #7cc0f5; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 {FONT};
  -webkit-text-size-adjust: 100%; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 56px 24px 80px; }}
h1 {{ font-size: 34px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 8px; }}
h2 {{ font-size: 24px; line-height: 1.25; letter-spacing: -0.01em; margin: 72px 0 10px; }}
h3 {{ font-size: 16px; margin: 44px 0 8px; }}
h1, h2, h3, td, th, p, li, summary {{ overflow-wrap: anywhere; }}
p, ul {{ max-width: 72ch; margin: 0 0 12px; }}
ul {{ padding-left: 20px; }}
.sub, figcaption, .note {{ color: var(--muted); font-size: 14px; }}
.verdict {{ font-size: 19px; line-height: 1.45; font-weight: 600; margin: 18px 0 20px; }}
header + section h2 {{ margin-top: 40px; }}
figure {{ margin: 8px 0 24px; }}
figcaption {{ max-width: 110ch; margin-top: 4px; }}
.scroll + .note {{ margin-top: 10px; max-width: 92ch; }}
.chart {{ width: 100%; min-height: 330px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; min-width: min(100%, 620px); }}
th, td {{ padding: 8px 12px; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top; }}
th {{ color: var(--muted); font-weight: 500; white-space: nowrap; overflow-wrap: normal; vertical-align: bottom; }}
tbody th {{ color: var(--ink); font-weight: 600; }}
td {{ overflow-wrap: normal; }}
tbody th {{ vertical-align: top; white-space: normal; min-width: 110px; }}
th:first-child, td:first-child, .text td, .text th, .models :nth-child(2) {{ text-align: left; }}
.models th {{ white-space: normal; overflow-wrap: anywhere; min-width: 84px; max-width: 200px; }}
th:first-child, td:first-child {{ padding-left: 0; }}
td small {{ display: block; color: var(--muted); font-size: 12px; white-space: nowrap; }}
td.share {{ background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share)) no-repeat
  0 100% / 100% 4px; min-width: 84px; }}
tr.best td, tr.best th {{ font-weight: 600; }}
tr.best td small {{ font-weight: 400; }}
button.csv {{ border: 0; background: none; padding: 0; font: inherit; font-size: 14px; color: var(--link);
  cursor: pointer; }}
details {{ border-top: 1px solid var(--grid); padding: 12px 0; }}
details:last-of-type {{ border-bottom: 1px solid var(--grid); }}
summary {{ cursor: pointer; font-weight: 600; }}
details > :nth-child(2) {{ margin-top: 12px; }}
pre {{ background: var(--wash); padding: 14px 16px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }}
a {{ color: var(--link); }}
@media (max-width: 640px) {{
  main {{ padding: 32px 16px 56px; }} h1 {{ font-size: 27px; }} h2 {{ font-size: 21px; margin-top: 56px; }}
  .verdict {{ font-size: 17px; }} th, td {{ padding: 7px 8px; }}
  .scroll th:first-child {{ position: sticky; left: 0; background: var(--paper); }}
  .scroll tbody th:first-child {{ max-width: 42vw; white-space: normal; }}
}}
@media print {{
  :root {{ --ink: {INK}; --muted: #3d454d; --grid: #c9ced4; --paper: #fff; --wash: #f5f6f8; --link: {INK};
    --bar: #b9cfe2; color-scheme: light; }}
  main {{ max-width: none; padding: 0; }} body {{ font-size: 11pt; }} .screen {{ display: none; }}
  figure, tr, .verdict {{ break-inside: avoid; }} h2, h3 {{ break-after: avoid; }} .scroll {{ overflow: visible; }}
  h2 {{ margin-top: 36px; }} table {{ font-size: 9pt; }} th, td {{ padding: 4px 6px; }}
}}
"""

# The policy lets nothing in from outside, whatever the page may contain.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def page(title: str, body: str, data: Mapping[str, str], scripts: Sequence[str], css: str = "") -> str:
    """`title` and `body` are HTML; `data` is JSON by the id of its element, safe inside a script element; `scripts` run
    after plotly and `draw.js`."""
    elements = "\n".join(f'<script type="application/json" id="{key}">{text}</script>' for key, text in data.items())
    drawing = f"const DARK = {json.dumps(DARK)};\n{script('draw')}"
    run = "\n".join(f"<script>{text}</script>" for text in (get_plotlyjs(), drawing, *scripts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{CSS}{css}</style>
</head>
<body>
{body}
{elements}
{run}
</body>
</html>
"""


def script(name: str) -> str:
    """One of the scripts beside this file."""
    return (files(__package__) / f"{name}.js").read_text("utf-8")

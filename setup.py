"""The README for a package index, with links to the repository. Everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
readme = (ROOT / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^]]*\]\()(?!https?:)([^)]+)", rf"\1{repository}/raw/main/\2", readme)
readme = re.sub(r"(\[[^]]*\]\()(?!https?:|#)([^)]+)", rf"\1{repository}/blob/main/\2", readme)
setup(long_description=readme, long_description_content_type="text/markdown")

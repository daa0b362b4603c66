"""What MkDocs cannot do by itself: pages from the repository's root, and links to its files.

Pages are written for the repository, where `../src/x.py` is a file. On the site such a link leads to the repository's
address, which pyproject.toml has.
"""

import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
FRONT_MATTER = {"README.md": "---\nhide: [navigation]\n---\n"}
LINK = re.compile(r"\[([^]\n]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=\W?https?:[^\s>]*|<link[^>]*\bhref=\W?https?:[^\s>]*")


def on_config(config):
    """Tasks have the order of playground.md. The footer links to the repository, as Material's `repo_url` would let
    readers' browsers ask GitHub."""
    [of_tasks] = [part["Tasks"] for part in config.nav[1]["Compare architectures"] if "Tasks" in part]
    of_tasks += re.findall(r"^\| \[\w+\]\((tasks/\w+\.md)\)", (ROOT / "docs/playground.md").read_text(), re.MULTILINE)
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository, "name": "Source code"}]
    return config


def on_files(files, config):
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=FRONT_MATTER.get(name, "") + (ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    origin = {page: name for name, page in FROM_ROOT.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    repository = config.extra["social"][0]["link"]
    return LINK.sub(lambda link: rewritten(*link.groups(""), origin, page.file.src_uri, repository), markdown)


def rewritten(text, target, anchor, origin, page, repository):
    """A link of the file `origin`, as the site's `page` needs it. A page that is named by its file gets its title."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    if path.endswith(".py") or (not path.startswith("docs/") and path not in FROM_ROOT):
        return f"[{text}]({repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor})"
    if text in (target, path, posixpath.basename(path)) and path.endswith(".md"):
        text = (ROOT / path).read_text().partition("\n")[0].removeprefix("# ")
    on_site = FROM_ROOT.get(path, path.removeprefix("docs/"))
    return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{anchor})"


def on_post_page(output, page, config):
    """Reading takes no network, and no table or list is left as text."""
    for defect in [*LOADED.findall(output), *re.findall(r"<p>\|.{,60}", output)]:
        raise PluginError(f"{page.file.src_uri}: {defect}")
    return output

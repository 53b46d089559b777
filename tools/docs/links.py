"""Rewrites the links of README and docs/ for readers outside the repository.

Pages have relative links, which work in a checkout. On the site of docs/ and on a package index,
paths into the repository do not work, so this module rewrites them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Documents outside docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# The site's folder for other linked files, such as examples and measured rows.
FILES = "files"

# The project's addresses are in [tool.flashsmith] of pyproject.toml.
_SETTING = r'^{name} = "([^"]*)"$'

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def published(name: str) -> str:
    """The address of the 'site' or the 'repository', without a trailing slash; may be ''.

    Raises LookupError if pyproject.toml has no such setting.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = text.partition("[tool.flashsmith]\n")[2].partition("\n[")[0]
    found = re.search(_SETTING.format(name=name), settings, re.MULTILINE)
    if found is None:
        raise LookupError(f"pyproject.toml: [tool.flashsmith] has no {name}")
    return found[1].rstrip("/")


def rewrite(text: str, target_of: Callable[[str], str | None]) -> str:
    """``text`` with each link's target outside code replaced by ``target_of(target)``.

    If the new target is None, a link becomes its text and a picture is removed.
    """

    def replaced(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        new = target_of(target)
        if new is None:
            return "" if mark else label
        return f"{mark}[{label}]({new})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])


def linked_path(document: str, target: str) -> tuple[str, str]:
    """The repository path that a document links, and the anchor with its '#'.

    The path is empty for links within the document and to other hosts.
    """
    name, mark, anchor = target.partition("#")
    if not name or "://" in name or name.startswith("mailto:"):
        return "", mark + anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), name)), mark + anchor


def site_path(path: str) -> str:
    """The path of a repository file among the site's sources."""
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    return PAGES.get(path, f"{FILES}/{path}")


def for_site(text: str, document: str) -> tuple[str, set[str]]:
    """A document's text for the site, and the linked files outside docs/."""
    here = posixpath.dirname(site_path(document)) or "."
    files = set()

    def target_of(target: str) -> str:
        path, anchor = linked_path(document, target)
        if not path:
            return target
        place = site_path(path)
        if place.startswith(f"{FILES}/"):
            files.add(path)
        return posixpath.relpath(place, here) + anchor

    return rewrite(text, target_of), files


def for_index(text: str, document: str, site: str) -> str:
    """A document's text for a package index, with absolute links to the pages of ``site``.

    Without a site, links become their text.
    """

    def target_of(target: str) -> str | None:
        path, anchor = linked_path(document, target)
        if not path:
            return target if "://" in target else None
        if not site:
            return None
        place = site_path(path)
        if place == "index.md":
            place = ""
        elif place.endswith(".md"):
            place = f"{place[:-3]}/"
        return f"{site.rstrip('/')}/{place}{anchor}"

    return rewrite(text, target_of)

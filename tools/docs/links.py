"""Where the links of README and docs/ lead when these are read outside of the repository.

On the site of docs/ and on a package index a path into the repository leads nowhere. Pages keep
their relative links, which work in a checkout; this rewrites them for the other two places.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Documents outside of docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Other files that pages link, such as examples and measured rows, are copied to the site.
FILES = "files"

# Where the project is published: [tool.flashsmith] of pyproject.toml.
_SETTING = r'^{name} = "([^"]*)"$'

_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def published(name: str) -> str:
    """Where the 'site' or the 'repository' is published, without a slash at the end; maybe ''.

    Raises LookupError where pyproject.toml has no such setting.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = text.partition("[tool.flashsmith]\n")[2].partition("\n[")[0]
    found = re.search(_SETTING.format(name=name), settings, re.MULTILINE)
    if found is None:
        raise LookupError(f"pyproject.toml: [tool.flashsmith] has no {name}")
    return found[1].rstrip("/")


def rewrite(text: str, target_of: Callable[[str], str | None]) -> str:
    """``text`` with each link's target replaced by ``target_of(target)``, code left alone.

    Where that is None a link becomes its text, and a picture goes.
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
    """The path in the repository that a document links, and the anchor with its '#'.

    The path is empty for a link into the document itself and for one to another host.
    """
    name, mark, anchor = target.partition("#")
    if not name or "://" in name or name.startswith("mailto:"):
        return "", mark + anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), name)), mark + anchor


def site_path(path: str) -> str:
    """Where a file of the repository stands among the site's sources."""
    if path.startswith(f"{DOCS}/"):
        return path[len(DOCS) + 1 :]
    return PAGES.get(path, f"{FILES}/{path}")


def for_site(text: str, document: str) -> tuple[str, set[str]]:
    """A document's text for the site, and the files outside of docs/ that it links."""
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
    """A document's text with absolute links to the pages of ``site``, for a package index.

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

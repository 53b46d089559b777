"""HTML as values: text is escaped unless it is already Html."""

from __future__ import annotations

import html
from collections.abc import Iterable

from flashsmith.printable import printable


class Html(str):
    """Text that is markup."""

    __slots__ = ()


_VOID = ("br", "img", "meta", "source")


def element(name: str, /, *children: str, **attributes: object) -> Html:
    """One element; an attribute's name may end in '_' (class_), and '_' within it stands for '-'.

    Attributes that are None or False are left out, True ones have no value.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """The parts one after the other."""
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    # HTML has no control characters either.
    return html.escape(printable(text, lines=True))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'

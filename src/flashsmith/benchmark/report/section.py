"""Section: a part of the page, and what may stand in it: figures, notes."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass

from flashsmith.benchmark.report.html import Html, element
from flashsmith.benchmark.report.pictures import Picture


@dataclass(frozen=True)
class Section:
    """A part of the page that links lead to; one without parts is not shown."""

    identifier: str
    heading: str
    parts: tuple[Html, ...]

    @property
    def shown(self) -> bool:
        """Whether there is anything in it."""
        return any(self.parts)

    @property
    def html(self) -> Html:
        """The section itself."""
        return element("section", element("h2", self.heading), *self.parts, id=self.identifier)

    @property
    def link(self) -> Html:
        """A link to it."""
        return element("a", self.heading, href=f"#{self.identifier}")


def section(identifier: str, heading: str, *parts: Html) -> Section:
    """The section of these parts."""
    return Section(identifier, heading, parts)


def figures(pictures: Iterable[Picture]) -> Html:
    """The pictures side by side, as many as the width allows."""
    drawn = [_figure(picture) for picture in pictures]
    return element("div", *drawn, class_="charts") if drawn else Html("")


def _figure(picture: Picture) -> Html:
    dark = element(
        "source", srcset=_data_url(picture.dark), media="screen and (prefers-color-scheme: dark)"
    )
    light = element("img", src=_data_url(picture.light), alt=picture.alt, width=picture.width)
    return element(
        "figure",
        element("picture", dark, light),
        element("figcaption", picture.caption),
        class_="wide" if picture.wide else None,
    )


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def note(text: str, alarm: bool = False) -> Html:
    """A paragraph that stands out."""
    return element("p", text, class_="note alarm" if alarm else "note")

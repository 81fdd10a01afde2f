"""The page: one file that needs nothing from anywhere."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Drawing:
    """A picture of the page, and a file of its own."""

    name: str
    """Of its file, without ``.png``."""
    heading: str
    caption: str
    figure: "Figure | None"
    """None where the results hold nothing to draw."""
    missing: str = ""
    """What they would have to hold."""


@dataclass(frozen=True)
class Content:
    """What a page says; ``table`` is HTML, all else is plain text."""

    title: str
    intro: str
    outcome: Sequence[str]
    table: str
    drawings: Sequence[Drawing]
    about: Mapping[str, Any]


def html(content: Content, pictures: Mapping[str, str]) -> str:
    """The page; pictures are SVG, by the name of the drawing."""
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(content.title),
        intro=escape(content.intro),
        outcome="\n".join(f"<li>{escape(one)}</li>" for one in content.outcome),
        table=content.table,
        figures="\n".join(_figure(one, pictures.get(one.name)) for one in content.drawings),
        about="\n".join(_about(content.about)),
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]], note: str) -> str:
    """``head`` is text; a row's cells are whole ``td`` elements."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{names}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>\n<p>{escape(note)}</p>"
    )


def cell(text: str, small: Iterable[str] = (), best: bool = False) -> str:
    """One figure, and smaller ones below it."""
    below = "".join(f"<small>{escape(one)}</small>" for one in small if one)
    mark = ' class="best"' if best else ""
    return f"<td{mark}>{escape(text)}{below}</td>"


def _figure(one: Drawing, svg: str | None) -> str:
    heading = f"<h2>{escape(one.heading)}</h2>"
    if svg is None:
        return f"{heading}\n<p>Not drawn: {escape(one.missing)}.</p>"
    caption = f"<figcaption>{escape(one.caption)}</figcaption>"
    return f"{heading}\n<figure>\n{caption}\n{svg}\n</figure>"


def _lines(value: Any) -> list[str]:
    """A value of the JSON in words."""
    if isinstance(value, Mapping):
        return [f"{key}: {', '.join(_lines(one))}" for key, one in value.items()]
    if isinstance(value, list):
        return [", ".join(", ".join(_lines(one)) for one in value)]
    return [f"{value:g}" if isinstance(value, float) else str(value)]


def _about(about: Mapping[str, Any]) -> Iterable[str]:
    for key, value in about.items():
        if value is not None:
            said = "<br>".join(escape(line) for line in _lines(value))
            said = f"<code>{said}</code>" if key == "command" else said
            yield f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{said}</dd>"

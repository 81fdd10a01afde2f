"""Results into a folder: the page, its pictures, the JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.report import costs, runs
from benchmarks.report.page import Content, html
from benchmarks.report.results import Overhead, read
from benchmarks.report.style import available, drawing, save, svg

_PICTURES = ("figures", "completion", "ttft", "load", "prediction", "overhead")
"""Those of an earlier run are not left beside a page that does not show them."""


def writable(folder: Path) -> None:
    """To be called before minutes of measuring; makes the folder.

    Raises:
        ValueError: matplotlib is missing.
        OSError: nothing can be written there.
    """
    available()
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()


def write(results: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``index.html``, its pictures as PNG, and ``results.json``; returns the page's path.

    Raises:
        ValueError: ``results`` is not what a benchmark writes with ``--json``, or matplotlib is
            missing.
        OSError: the folder cannot be written.
    """
    writable(folder)
    known = read(results)
    for name in _PICTURES:
        (folder / f"{name}.png").unlink(missing_ok=True)
    with drawing():
        content = costs.content(known) if isinstance(known, Overhead) else runs.content(known)
        pictures = _pictures(content, folder)
    page = folder / "index.html"
    page.write_text(html(content, pictures), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return page


def _pictures(content: Content, folder: Path) -> dict[str, str]:
    """Those that can be drawn, as SVG; a PNG of each is written."""
    drawn = {}
    for one in content.drawings:
        if one.figure is not None:
            drawn[one.name] = svg(one.figure, one.name, one.heading)
            below = [one.caption, *_footer(content.about)]
            save(one.figure, folder / f"{one.name}.png", one.heading, below)
    return drawn


def _footer(about: Mapping[str, Any]) -> list[str]:
    """Date, machine and command, as far as they are known."""
    facts = [about.get("date") or about.get("started"), about.get("machine")]
    lines = [" · ".join(str(one) for one in facts if one), str(about.get("command") or "")]
    return [line for line in lines if line]

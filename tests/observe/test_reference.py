"""The reference of metrics in docs/operations.md, and metrics that other pages name.

``python -m tests.observe.test_reference`` writes the reference anew.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from extproc.observe.metrics import RouterMetrics
from extproc.poll.scrape import PollMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operations.md"
BEGIN, END = (
    f"<!-- {what}: python -m tests.observe.test_reference -->" for what in ("made by", "end")
)


def families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    PollMetrics(registry)
    for collector in registry._collector_to_names:
        (family,) = collector.collect()
        own: Sequence[str] = getattr(collector, "_labels", ())
        found: Sequence[str] = getattr(collector, "_labelnames", own)
        yield family, tuple(found)


def names(family: Metric) -> list[str]:
    match family.type:
        case "counter":
            return [f"{family.name}_total"]
        case "histogram":
            return [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
    return [family.name]


def series() -> dict[str, tuple[bool, set[str]]]:
    return {
        name: (family.type != "gauge", set(found))
        for family, found in families()
        for name in names(family)
    }


def reference() -> Iterator[str]:
    yield "| metric | kind | what it says |"
    yield "|---|---|---|"
    for family, found in families():
        name = family.name if family.type == "histogram" else names(family)[0]
        shown = f"{{{','.join(found)}}}" if found else ""
        text = family.documentation.replace("|", "\\|")
        yield f"| `{name}{shown}` | {family.type} | {text} |"


def parts(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(BEGIN + "\n")
    table, _, after = rest.partition("\n" + END)
    return before, table, after


def test_reference_shows_the_metrics() -> None:
    _, table, _ = parts(PAGE.read_text())
    assert table == "\n".join(reference()), "run: python -m tests.observe.test_reference"


def test_pages_name_only_metrics_that_exist() -> None:
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in series()}
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md"]
    texts = (re.sub("### Removed.*?(?=\n### )", "", page.read_text(), flags=re.S) for page in pages)
    named = {name for text in texts for name in re.findall(r"\bextproc_[a-z_]+", text)}
    assert "extproc_state_age_seconds" in named
    assert named - shown == set()


if __name__ == "__main__":
    _before, _, _after = parts(PAGE.read_text())
    PAGE.write_text(_before + "\n".join((BEGIN, *reference(), END)) + _after)

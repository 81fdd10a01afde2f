"""``docs/reference.md`` lists the metrics, alerts and log events that the code has.

``python -m tests.observe.test_reference`` writes the page anew.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from extproc.observe.metrics import RouterMetrics, build_info
from extproc.poll.scrape import PollMetrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "reference.md"
RULES = DOCS / "observability" / "rules.yaml"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
INTRODUCTION = """\
# Reference: metrics, alerts and log events

Written by `python -m tests.observe.test_reference` from the code; do not edit this page.
[Monitor](operations/monitor.md) explains how to use it."""
METRICS = """
## Metrics

Each process has its own series: sum them over routers or pollers. Histograms have `_bucket`, `_sum`
and `_count`. Pollers have the names with `_poll_`, routers all others.

| metric | kind | meaning |
|---|---|---|"""
ALERTS = """
## Alerts

[rules.yaml](observability/rules.yaml) has the expressions.

| alert | severity | after | meaning | what to do |
|---|---|---|---|---|"""
EVENTS = """
## Log events

A name in braces stands for a value. Most lines have further fields: the replica, the pool, the
error.

| event | level | logged by |
|---|---|---|"""


def families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    PollMetrics(registry)
    build_info(registry)
    for collector in registry._collector_to_names:
        (family,) = collector.collect()
        own: Sequence[str] = getattr(collector, "_labels", ())
        labels: Sequence[str] = getattr(collector, "_labelnames", own)
        yield family, tuple(labels)


def names(family: Metric) -> list[str]:
    match family.type:
        case "counter":
            return [f"{family.name}_total"]
        case "histogram":
            return [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
    return [family.name]


def series() -> dict[str, tuple[bool, set[str]]]:
    return {
        name: (family.type != "gauge", set(labels))
        for family, labels in families()
        for name in names(family)
    }


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def log_events() -> list[tuple[str, str, str]]:
    """Event, level and module of each line that the package logs, except ``lab``."""
    found = set[tuple[str, str, str]]()
    for path in (ROOT / "extproc").rglob("*.py"):
        module = str(path.relative_to(ROOT / "extproc"))
        if not module.startswith("lab/"):
            tree = ast.parse(path.read_text())
            texts = assigned(tree)
            found |= {
                (words(text, texts), level, module)
                for node in ast.walk(tree)
                for level, text in logged(node)
            }
    return sorted(found, key=lambda event: (event[2], event))


def logged(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="log" | "logger"), attr=level), args=[text, *_]
        ) if level in LEVELS:
            yield level.replace("exception", "error"), text
        case ast.Call(func=ast.Name(id="CounterLog"), args=[_, event, *_]):
            yield "warning", event
        case ast.Call(func=ast.Name(id="OutageLog"), args=[_, begins, *more], keywords=keywords):
            given = [*more, *(keyword.value for keyword in keywords)]
            yield "error" if "logging.ERROR" in map(ast.unparse, given) else "warning", begins
            yield from (("info", over) for over in more[:1])


def assigned(tree: ast.AST) -> dict[str, ast.expr]:
    found = dict[str, ast.expr]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=True)
                found |= {at.id: value for at, value in pairs if isinstance(at, ast.Name)}
    return found


def words(text: ast.expr, texts: dict[str, ast.expr]) -> str:
    match text:
        case ast.Name(id=name):
            return words(texts[name], texts)
        case ast.JoinedStr(values=parts):
            return "".join(words(part, texts) for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value).rpartition('.')[2].strip('_')}}}"
    assert isinstance(text, ast.Constant), ast.unparse(text)
    return re.sub(r"%[ds]", "{}", str(text.value))


def reference() -> str:
    lines = [INTRODUCTION, METRICS]
    for family, labels in families():
        name = family.name if family.type == "histogram" else names(family)[0]
        shown = f"{{{','.join(labels)}}}" if labels else ""
        text = family.documentation.replace("|", "\\|")
        lines.append(f"| `{name}{shown}` | {family.type} | {text} |")
    lines.append(ALERTS)
    for rule in rules():
        summary, remedy = (rule["annotations"][part] for part in ("summary", "description"))
        summary = re.sub(r"{{ ?\$(?:labels\.)?(\w+).*?}}", r"{\1}", summary)
        severity = rule["labels"]["severity"]
        lines.append(f"| `{rule['alert']}` | {severity} | {rule['for']} | {summary} | {remedy} |")
    lines.append(EVENTS)
    lines += (f"| {event} | {level} | `{module}` |" for event, level, module in log_events())
    return "\n".join(lines) + "\n"


def test_reference_lists_metrics_alerts_and_log_events() -> None:
    assert PAGE.read_text() == reference(), "run: python -m tests.observe.test_reference"


def test_pages_name_only_metrics_that_exist() -> None:
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in series()}
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    # Without the column "before" of the changelog's tables of names.
    texts = (re.sub(r"^  \|[^|]+\|", "", page.read_text(), flags=re.M) for page in pages)
    named = {name for text in texts for name in re.findall(r"\bextproc_[a-z_]+", text)}
    assert "extproc_state_age_seconds" in named
    assert named - shown == set()


if __name__ == "__main__":
    PAGE.write_text(reference())

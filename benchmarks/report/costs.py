"""What the page of ``overhead`` says."""

from benchmarks.report.overhead import costs
from benchmarks.report.page import Content, Drawing, cell, table
from benchmarks.report.results import Latency, Overhead, Setup
from benchmarks.report.sentences import added

_INTRO = (
    "The same small requests were sent through Envoy alone, through Envoy with an ext_proc server "
    "that does nothing, and through Envoy with the router. Behind it a server answers at once, so "
    "that what is seen is the way, not the model."
)
_CAPTION = (
    "Latency at a fixed rate of requests; requests a second and CPU with a fixed number in flight "
    "all the time; memory that the router's process grew by for each request in flight."
)
_HEAD = (
    *("", "Latency, p50", "p95", "p99", "Requests/s", "Failed"),
    *("Router's CPU per request", "Router's memory per stream"),
)


def content(overhead: Overhead) -> Content:
    """Everything but the files."""
    alone = overhead.setups[0]
    note = f"Latency in ms, and below it how much more than {alone.name}."
    rows = [_row(one, alone) for one in overhead.setups]
    return Content(
        "Envoy with and without the router",
        _INTRO,
        added(overhead),
        table(_HEAD, rows, note),
        [
            Drawing(
                "overhead",
                "What the router adds, and what it costs",
                _CAPTION,
                costs(overhead.setups),
            )
        ],
        overhead.about,
    )


def _row(one: Setup, alone: Setup) -> list[str]:
    return [
        cell(one.name),
        *(_latency(one.rate, alone.rate, name) for name in ("p50_ms", "p95_ms", "p99_ms")),
        cell(f"{one.requests_per_s:,.0f}"),
        cell(f"{one.failed:,}"),
        cell(f"{one.cpu_us:,.0f} µs"),
        cell(f"{one.stream_kb:,.0f} kB"),
    ]


def _latency(one: Latency, alone: Latency, name: str) -> str:
    value = getattr(one, name)
    more = [] if one is alone else [f"+{value - getattr(alone, name):.2f}"]
    return cell(f"{value:.2f}", more)

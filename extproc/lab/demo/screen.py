"""Terminal of the demo: replicas and requests as a live page, or as plain lines."""

import time
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.highlighter import RegexHighlighter
from rich.padding import Padding
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from extproc.ground.text import bar
from extproc.lab.demo.journal import Entry, Journal
from extproc.lab.harness.stack import SimulatedReplica, Stack

_LEAST_LINES, _MOST_LINES = 6, 40
_WHY_INDENT = 3
_REPLICAS = ("replica", "hardware", "running", "waiting", "in flight", "served", "KV cache")
_REQUESTS = ("request", "prompt", "replica", "predicted", "actual")
_TEXT_COLUMNS = {"replica", "hardware", "request"}
_COLUMN_WIDTH = 36  # characters of a UUID: a request's figures fit 80 columns


class _Colours(RegexHighlighter):
    highlights = (r"(?P<green>fast-\d+)", r"(?P<magenta>slow-\d+)", r"(?P<cyan>█+)")


_coloured = _Colours()


class Screen:
    """Renders the present state of a stack; for :class:`rich.live.Live`."""

    def __init__(self, stack: Stack, journal: Journal, reserved: int = 0) -> None:
        """``reserved``: terminal lines for text printed before the screen."""
        self._stack = stack
        self._journal = journal
        self._reserved = reserved + len(stack.replicas) + 7

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = min(max(console.height - self._reserved, _LEAST_LINES), _MOST_LINES)
        newest = list(islice(reversed(self._journal.entries.values()), lines))[::-1]
        table = _table(_REQUESTS, [_figures(entry, self._stack) for entry in newest])
        header, *rows = console.render_lines(table, options)
        reasons = (Padding(Text(_why(entry), "dim"), (0, 0, 0, _WHY_INDENT)) for entry in newest)
        requests = [
            [row, *console.render_lines(reason, options)]
            for row, reason in zip(rows, reasons, strict=True)
        ]
        while len(requests) > 1 and sum(map(len, requests)) > lines:
            del requests[0]
        replicas = _table(_REPLICAS, map(self._replica, self._stack.replicas))
        yield from ("", self._status(), "", replicas, "")
        yield SegmentLines([header, *chain.from_iterable(requests)], new_lines=True)

    def _status(self) -> Text:
        entries = self._journal.entries.values()
        routed = sum(entry.decision is not None for entry in entries)
        fallback = sum(entry.fallback for entry in entries)
        up = self._journal.router_up
        router = "router up" if up else "router down: Envoy's fallback serves"
        counts = f"   {len(entries)} requests: {routed} routed, {fallback} by fallback"
        return Text.assemble((router, "bold green" if up else "bold red"), counts)

    def _replica(self, replica: SimulatedReplica) -> list[str]:
        served = str(self._journal.served[self._stack.address(replica.name)])
        now = self._journal.fleet.get(replica.name)
        if now is None:
            return [replica.name, replica.profile, "-", "-", "-", served, "-"]
        numbers = map(str, (now.running, now.waiting, now.in_flight))
        kv = bar(now.kv_usage) if now.healthy else "no answer"
        return [replica.name, replica.profile, *numbers, served, kv]


def plain(entry: Entry, stack: Stack) -> str:
    """Line of a request that ended."""
    name, _, where, predicted, actual = _figures(entry, stack)
    head = f"{name:<16} → {where:<7} predicted {predicted:>8}  actual {actual:>8}"
    return f"{head}  {_why(entry)}"


def _table(headers: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for header in headers:
        justify: JustifyMethod = "left" if header in _TEXT_COLUMNS else "right"
        table.add_column(header, justify=justify, no_wrap=True, max_width=_COLUMN_WIDTH)
    for row in rows:
        table.add_row(*map(_coloured, row))
    return table


def _figures(entry: Entry, stack: Stack) -> list[str]:
    decision, access = entry.decision, entry.access
    predicted = decision.predicted_completion_s if decision else None
    served = access.upstream if access else decision.replica if decision else ""
    return [
        entry.request_id,
        str(decision.prompt_tokens) if decision else "-",
        stack.name_of(served) or "-",
        "-" if predicted is None else f"{predicted:.2f} s",
        f"{access.duration_s:.2f} s" if access else f"{time.monotonic() - entry.seen_at:.1f} ...",
    ]


def _why(entry: Entry) -> str:
    if entry.access is not None and entry.access.status != 200:
        return f"status {entry.access.status}" if entry.access.status else "the client left"
    if entry.decision is None:
        return "no decision: Envoy's fallback"
    return entry.decision.why.partition(";")[0]  # the first of its comparisons

"""The demo on the terminal: replicas and requests as a live page, or as plain lines."""

import time
from itertools import chain

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from extproc.ground.text import Column, bar, paragraph, table
from extproc.lab.demo.journal import Entry, Journal
from extproc.lab.harness.stack import SimulatedReplica, Stack

_LEAST_LINES, _MOST_LINES = 6, 40
_WHY_INDENT = 3
_REPLICAS = (
    *(Column("replica", left=True), Column("hardware", left=True)),
    *map(Column, ("running", "waiting", "in flight", "served", "KV cache")),
)
_REQUESTS = (
    Column("request", left=True, most=36),
    Column("prompt"),
    Column("replica", left=True),
    Column("predicted"),
    Column("actual"),
)
"""They fit 80 columns, with the id whole; why each went there is in the lines below it."""
_STYLES = {
    r"fast-\d+": "green",
    r"slow-\d+": "magenta",
    r"█+": "cyan",
    r"(?m)^(replica|request) .*$": "bold dim",
    rf"(?m)^ {{{_WHY_INDENT}}}.*$": "dim",
    r"router up": "bold green",
    r"router down": "bold red",
}


class Screen:
    """Renders the present state of a stack; for :class:`rich.live.Live`."""

    def __init__(self, stack: Stack, journal: Journal, reserved: int = 0) -> None:
        """A screen that leaves ``reserved`` lines of the terminal to what was printed before."""
        self._stack = stack
        self._journal = journal
        self._reserved = reserved + len(stack.replicas) + 7

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = min(max(console.height - self._reserved, _LEAST_LINES), _MOST_LINES)
        requests = self._requests(lines, options.max_width)
        text = Text("\n".join(["", self._status(), "", *self._replicas(), "", *requests]))
        for pattern, style in _STYLES.items():
            text.highlight_regex(pattern, style)
        yield text

    def _status(self) -> str:
        entries = self._journal.entries.values()
        routed = sum(entry.decision is not None for entry in entries)
        fallback = sum(entry.fallback for entry in entries)
        router = "up" if self._journal.router_up else "down: Envoy's fallback serves"
        return f"router {router}   {len(entries)} requests: {routed} routed, {fallback} by fallback"

    def _replicas(self) -> list[str]:
        return table(_REPLICAS, [self._replica(replica) for replica in self._stack.replicas])

    def _replica(self, replica: SimulatedReplica) -> list[str]:
        served = str(self._journal.served[self._stack.address(replica.name)])
        now = self._journal.fleet.get(replica.name)
        if now is None:
            return [replica.name, replica.profile, "-", "-", "-", served, "-"]
        numbers = map(str, (now.running, now.waiting, now.in_flight))
        kv = bar(now.kv_usage) if now.healthy else "no answer"
        return [replica.name, replica.profile, *numbers, served, kv]

    def _requests(self, lines: int, width: int) -> list[str]:
        """The newest requests that fit into so many lines, the newest last."""
        rows: list[list[str]] = []
        whys: list[list[str]] = []
        for entry in reversed(self._journal.entries.values()):
            why = paragraph(_why(entry), _WHY_INDENT, width=width)
            lines -= 1 + len(why)
            if rows and lines < 0:
                break
            rows.append(_figures(entry, self._stack))
            whys.append(why)
        header, *figures = table(_REQUESTS, rows[::-1])
        return [header, *chain.from_iterable(zip(figures, map("\n".join, whys[::-1]), strict=True))]


def _figures(entry: Entry, stack: Stack) -> list[str]:
    decision, access = entry.decision, entry.access
    return [
        entry.request_id,
        str(decision.prompt_tokens) if decision else "-",
        _where(entry, stack),
        f"{decision.predicted_completion_s:.2f} s" if decision else "-",
        f"{access.duration_s:.2f} s" if access else f"{time.monotonic() - entry.seen_at:.1f} ...",
    ]


def plain(entry: Entry, stack: Stack) -> str:
    """A request that ended, as one line."""
    name, _, where, predicted, actual = _figures(entry, stack)
    head = f"{name:<16} → {where:<7} predicted {predicted:>8}  actual {actual:>8}"
    return f"{head}  {_why(entry)}"


def _where(entry: Entry, stack: Stack) -> str:
    if entry.access is not None:
        return stack.name_of(entry.access.upstream) or "-"
    return stack.name_of(entry.decision.replica) if entry.decision else "-"


def _why(entry: Entry) -> str:
    if entry.access is not None and entry.access.status != 200:
        return f"status {entry.access.status}" if entry.access.status else "the client left"
    if entry.decision is None:
        return "no decision: Envoy's fallback"
    return entry.decision.why.partition(";")[0]  # beside the next best; `extproc explain` has all

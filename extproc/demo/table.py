"""The demo on the terminal: replicas and requests as a live table, or as plain lines."""

import textwrap
import time

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from extproc.demo.journal import Entry, Journal
from extproc.demo.report import Report, Run
from extproc.demo.stack import Stack

_KV_BAR = 10
_LEAST_LINES, _MOST_LINES = 6, 40
_WHY_INDENT = 3
_HEADERS = ("Request", "Prompt", "", "Replica", "Predicted", "Actual")
_MOST_OF_ID = 36
_REQUEST = " {:<36} {:>6} {:6} {:7} {:>9} {:>7}"
"""A request's figures fit 80 columns, its id whole; why it went there is in the lines below."""


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
        yield Group(self._status(), self._replicas(), Text(), *requests)

    def _status(self) -> Text:
        entries = self._journal.entries.values()
        routed = sum(entry.decision is not None for entry in entries)
        fallback = sum(entry.fallback for entry in entries)
        status = Text("\n router ")
        if self._journal.router_up:
            status.append("up", style="bold green")
        else:
            status.append("down: Envoy's fallback serves", style="bold red")
        status.append(f"   {len(entries)} requests: {routed} routed, ")
        status.append(f"{fallback} by fallback\n", style="yellow" if fallback else "")
        return status

    def _replicas(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="bold dim")
        table.add_column("Replica")
        table.add_column("Hardware", min_width=13)
        for header in ("Running", "Waiting", "In flight", "Served"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("KV cache", min_width=17)
        for replica in self._stack.replicas:
            address = self._stack.address(replica.name)
            served = str(self._journal.served[address])
            now = self._journal.fleet.get(replica.name)
            name = _replica(replica.name)
            if now is None:
                table.add_row(name, replica.profile, "–", "–", "–", served, "–")
                continue
            if not now.healthy:
                name.stylize("red strike")
            numbers = map(str, (now.running, now.waiting, now.in_flight))
            table.add_row(name, replica.profile, *numbers, served, _bar(now.kv_usage))
        return table

    def _requests(self, lines: int, width: int) -> list[Text]:
        """The newest requests that fit into so many lines, the newest last."""
        shown: list[Text] = []
        for entry in reversed(self._journal.entries.values()):
            why = textwrap.wrap(_why(entry), width - _WHY_INDENT) or [""]
            if shown and len(shown) + 1 + len(why) > lines:
                break
            style = "dim" if entry.decision else "yellow"
            shown += [Text(" " * _WHY_INDENT + line, style=style) for line in reversed(why)]
            shown.append(_figures(entry, self._stack))
        return [Text(_REQUEST.format(*_HEADERS), style="bold dim"), *reversed(shown)]


def _replica(name: str) -> Text:
    return Text(name, style=_style(name))


def _style(replica: str) -> str:
    return "green" if replica.startswith("fast") else "magenta"


def _bar(share: float) -> Text:
    full = round(share * _KV_BAR)
    bar = Text().append("█" * full, style="cyan").append("░" * (_KV_BAR - full), style="dim")
    return bar.append(f" {share:6.1%}")


def _figures(entry: Entry, stack: Stack) -> Text:
    decision, access = entry.decision, entry.access
    where = _where(entry, stack)
    line = Text(
        _REQUEST.format(
            entry.request_id[:_MOST_OF_ID],
            decision.prompt_tokens if decision else "–",
            "stream" if decision and decision.stream else "",
            where,
            f"{decision.predicted_completion_s:.2f} s" if decision else "–",
            f"{access.duration_s:.2f} s" if access else f"{time.monotonic() - entry.seen_at:.1f} …",
        ),
        no_wrap=True,
    )
    line.highlight_words([where], _style(where))
    return line


def plain(entry: Entry, stack: Stack) -> str:
    """A request that ended, as one line."""
    decision, access = entry.decision, entry.access
    predicted = f"{decision.predicted_completion_s:6.2f} s" if decision else "       –"
    actual = f"{access.duration_s:6.2f} s" if access else "       –"
    where = _where(entry, stack)
    head = f"{entry.request_id:<16} → {where:<7} predicted {predicted}  actual {actual}"
    return f"{head}  {_why(entry)}"


def _where(entry: Entry, stack: Stack) -> str:
    if entry.access is not None:
        return stack.name_of(entry.access.upstream) or "–"
    return stack.name_of(entry.decision.replica) if entry.decision else "–"


def _why(entry: Entry) -> str:
    if entry.access is not None and entry.access.status != 200:
        return f"status {entry.access.status}" if entry.access.status else "the client left"
    if entry.decision is None:
        return "no decision: Envoy's fallback"
    return entry.decision.why.partition(";")[0]  # beside the next best; `extproc explain` has all


def summary(report: Report) -> Table:
    """Both runs, side by side."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column(f"{len(report.run.answers)} requests")
    table.add_column("default", justify="right")
    table.add_column("round_robin", justify="right")
    runs = (report.run, report.round_robin)
    table.add_row("answered", *(str(run.ok) for run in runs))
    table.add_row("routed / by fallback", *(f"{run.routed} / {run.fallback}" for run in runs))
    for title, measure in (("completion", "completion_s"), ("first token", "ttft_s")):
        for percentile in ("p50", "p99"):
            values = [getattr(run, measure)[percentile] for run in runs]
            style = "bold" if (measure, percentile) == ("completion_s", "p99") else ""
            table.add_row(f"{title} {percentile}", *map(_seconds, values), style=style)
    for name in report.run.per_replica:
        table.add_row(f"{name}: served, busy", *(_share(run, name) for run in runs))
    return table


def conclusions(report: Report) -> list[str]:
    """The summary's other figures, one line each."""
    run, lines = report.run, []
    if report.p99_ratio is not None:
        lines.append(f"p99 completion: {report.p99_ratio:.1f} times as long under round_robin")
    if run.predicted_error_median is not None:
        error = f"{run.predicted_error_median:.0%}"
        lines.append(f"prediction error: {error} in the median, the answers' lengths being unknown")
    if run.added_ms["p50"] is not None and run.added_ms["p99"] is not None:
        p50, p99 = run.added_ms["p50"], run.added_ms["p99"]
        lines.append(f"the router adds {p50:.1f} ms in the median, {p99:.1f} ms at p99")
    return lines


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _share(run: Run, name: str) -> str:
    return f"{run.per_replica[name]:4} {run.load.busy(name):5.0%}"

"""Results of a run: a record of each request, figures, their table, and warnings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.load.plan import Planned
from extproc.ground import text
from extproc.ground.text import Column, figure
from extproc.lab.harness.traffic import Answer, Client
from extproc.lab.replay.figures import FIGURES, distribution

Figures = dict[str, Any]  # in the form of the JSON report; times in seconds
Record = Mapping[str, Any]  # of a request, made by :func:`record`

LATE_S = 0.02  # limit of p99 of lateness, a few engine steps: beyond it, arrivals are not as traced
BUSY = 0.9  # share of a core in a second: beyond it, the client's own delays count
_OFF = 0.05  # tolerated relative difference from the trace's token counts

_ROWS = (
    ("time to first token", "ttft_s"),
    ("between chunks", "gap_s"),
    ("completion", "completion_s"),
    ("sent late by", "late_s"),
)


@dataclass(frozen=True, slots=True)
class Effort:
    cpu_s: float
    busiest_second: float  # share of a core in the second with the most use


def record(planned: Planned, answer: Answer) -> Figures:
    """Request and answer as a record of ``--json``."""
    return {
        "at_s": planned.at_s,
        "late_s": answer.late_s,
        "endpoint": planned.endpoint,
        "objective": planned.objective,
        "streamed": planned.streamed,
        "prompt_tokens": planned.traced.prompt_tokens,
        "max_tokens": planned.max_tokens,
        "planned_output_tokens": planned.traced.output_tokens,
        "request_id": answer.request_id,
        "counted_prompt_tokens": answer.tokens("prompt"),
        "output_tokens": answer.tokens("completion"),
        "ttft_s": answer.ttft_s,
        "completion_s": answer.completion_s if answer.ok else None,
        "failed_after_s": None if answer.ok else answer.completion_s,
        "gaps_s": _gaps(answer.gaps_s),
        "status": answer.status,
        "error": answer.problem or None,
        "replica": answer.replica,
    }


def summary(
    records: Sequence[Record], client: Client, effort: Effort, took_s: float, excluded: int = 0
) -> Figures:
    """Figures of a run. ``excluded``: number of requests that did not fit into the context."""
    answered = [entry for entry in records if entry["error"] is None]
    answers = client.answers.values()
    gaps = chain.from_iterable(answer.gaps_s for answer in answers if answer.ok)
    errors = Counter(entry["error"] for entry in records if entry["error"])
    figures: Figures = {
        "requests": len(records),
        "excluded": excluded,
        "answered": len(answered),
        "failed": len(records) - len(answered),
        "requests_per_s": len(answered) / took_s,
        "output_tokens_per_s": sum(entry["output_tokens"] or 0 for entry in answered) / took_s,
        **_latencies(answered),
        "gap_s": distribution(np.fromiter(gaps, np.float64)),
        "late_s": distribution([entry["late_s"] for entry in records]),
        "errors": dict(errors.most_common()),
        "replicas": _by("replica", [entry for entry in records if entry["replica"]]),
        "objectives": _by("objective", records),
        "prompt_tokens": _tokens(answered, "prompt_tokens", "counted_prompt_tokens"),
        "output_tokens": _tokens(answered, "planned_output_tokens", "output_tokens"),
        "client": {
            "cpu_s": effort.cpu_s,
            "busiest_second": effort.busiest_second,
            "cpu_us_per_request": 1e6 * effort.cpu_s / max(len(records), 1),
            "chunks": sum(answer.chunks for answer in answers),
            "most_in_flight": client.most_in_flight,
        },
    }
    return {**figures, "warnings": list(_warnings(figures))}


def table(figures: Figures) -> str:
    head = [Column("seconds", left=True), *map(Column, FIGURES)]
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered, "
        f"{figures['requests_per_s']:.2f} requests/s, "
        f"{figures['output_tokens_per_s']:.0f} tokens/s\n",
        *text.table(head, [[label, *_cells(figures[key], FIGURES)] for label, key in _ROWS]),
    ]
    for label, groups in (("replica", figures["replicas"]), ("objective", figures["objectives"])):
        if any(groups):
            names = ("requests", "failed", "TTFT p50", "p99", "completion p50", "p99")
            head = [Column(label, left=True), *map(Column, names)]
            rows = [_row(name or "-", group) for name, group in groups.items()]
            lines += ["", *text.table(head, rows)]
    if figures["excluded"]:
        lines.append(f"\nnot sent, too long for the context: {figures['excluded']} requests")
    if figures["errors"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in figures["errors"].items())
        lines.append(f"\nfailed: {kinds}")
    client = figures["client"]
    lines.append(
        f"\nclient: {client['most_in_flight']} requests in flight at most, "
        f"{client['cpu_us_per_request']:.0f} µs of CPU a request, "
        f"{client['busiest_second']:.0%} of a core in its busiest second"
    )
    return "\n".join([*lines, *(f"WARNING: {text}" for text in figures["warnings"])])


def _row(name: str, group: Figures) -> list[str]:
    ttft, completion = (_cells(group[key], ("p50", "p99")) for key in ("ttft_s", "completion_s"))
    return [name, str(group["requests"]), str(group["failed"]), *ttft, *completion]


def _cells(figures: Figures | None, names: Sequence[str]) -> list[str]:
    return [figure(figures[name] if figures else None) for name in names]


def _by(key: str, records: Sequence[Record]) -> Figures:
    groups: Figures = {}
    for name in sorted({entry[key] for entry in records}):
        group = [entry for entry in records if entry[key] == name]
        answered = [entry for entry in group if entry["error"] is None]
        failed = len(group) - len(answered)
        groups[name] = {"requests": len(group), "failed": failed, **_latencies(answered)}
    return groups


def _latencies(answered: Sequence[Record]) -> Figures:
    return {
        key: distribution([entry[key] for entry in answered if entry[key] is not None])
        for key in ("ttft_s", "completion_s")
    }


def _gaps(seconds: Sequence[float]) -> Figures | None:
    if not len(seconds):
        return None
    p99 = float(np.quantile(seconds, 0.99, method="inverted_cdf"))
    return {"mean": sum(seconds) / len(seconds), "p99": p99, "max": max(seconds)}


def _tokens(answered: Iterable[Record], planned: str, counted: str) -> dict[str, int]:
    """Sums of planned tokens and of tokens that the server counted; answers without a count are
    left out."""
    known = [entry for entry in answered if entry[counted] is not None]
    keys = {"planned": planned, "counted": counted}
    return {name: sum(entry[key] for entry in known) for name, key in keys.items()}


def _warnings(figures: Figures) -> Iterable[str]:
    late, client = figures["late_s"], figures["client"]
    if late and late["p99"] > LATE_S:
        yield (
            f"requests were sent {1000 * late['p99']:.0f} ms late at p99, not when the trace "
            "says: do not trust the figures; use an idle machine or a lower --speed"
        )
    if client["busiest_second"] > BUSY:
        yield (
            f"the client used {client['busiest_second']:.0%} of a core in its busiest second, "
            "so answers look slower than they are: do not trust the figures; use a lower --speed"
        )
    for kind, reason in (
        ("prompt", "the server counts words differently"),
        ("output", "only simulated replicas generate what the trace says; see --known-lengths"),
    ):
        tokens = figures[f"{kind}_tokens"]
        if tokens["planned"] and abs(tokens["counted"] / tokens["planned"] - 1) > _OFF:
            share = tokens["counted"] / tokens["planned"]
            yield f"{kind} tokens are {share:.0%} of the trace's: {reason}"

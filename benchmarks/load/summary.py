"""What a run came to: figures, the table of them, and whether they can be trusted."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.load.client import Sent, Traffic
from benchmarks.load.effort import Effort

Figures = dict[str, Any]
"""In the form of the JSON report; times in seconds."""

LATE_S = 0.02
"""Lateness at p99 from which on the arrivals are no longer the trace's: some engine steps."""
BUSY = 0.9
"""Share of a core in a second from which on the client, not the target, sets the times."""
_OFF = 0.05
"""By how much token counts may differ from the trace's."""

_FIGURES = ("mean", "p50", "p95", "p99")
_ROWS = (
    ("time to first token", "ttft_s"),
    ("between chunks", "gap_s"),
    ("completion", "completion_s"),
    ("sent late by", "late_s"),
)


def summary(traffic: Traffic, effort: Effort, left_out: int = 0) -> Figures:
    """A run in figures; a distribution of nothing is None.

    ``left_out`` requests of the trace were not sent, for the context has no room for them.
    """
    sent = traffic.sent
    answered = [one for one in sent if one.error is None]
    seconds = max(traffic.ended_at_s, 1e-9)
    figures: Figures = {
        "requests": len(sent),
        "left_out": left_out,
        "answered": len(answered),
        "failed": len(sent) - len(answered),
        "requests_per_s": len(answered) / seconds,
        "output_tokens_per_s": sum(one.output_tokens or 0 for one in answered) / seconds,
        **_latencies(answered),
        "gap_s": _distribution(traffic.gaps_s),
        "late_s": _distribution([one.late_s for one in sent]),
        "errors": dict(Counter(one.error for one in sent if one.error).most_common()),
        "replicas": _by_replica(sent),
        "prompt_tokens": _tokens(
            (one.prompt_tokens, one.counted_prompt_tokens) for one in answered
        ),
        "output_tokens": _tokens(
            (one.planned_output_tokens, one.output_tokens) for one in answered
        ),
        "client": {
            "cpu_s": effort.cpu_s,
            "busiest_second": effort.busiest_second,
            "cpu_us_per_request": 1e6 * effort.cpu_s / max(len(sent), 1),
            "chunks": traffic.chunks,
            "most_in_flight": traffic.most_in_flight,
        },
    }
    return {**figures, "warnings": list(_warnings(figures))}


def table(figures: Figures) -> str:
    """The figures, for people."""
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered, "
        f"{figures['requests_per_s']:.2f} requests/s, "
        f"{figures['output_tokens_per_s']:.0f} tokens/s",
        f"\n{'seconds':<22}" + "".join(f"{name:>10}" for name in _FIGURES),
        *(f"{label:<22}{_cells(figures[key], _FIGURES)}" for label, key in _ROWS),
        *_replica_lines(figures["replicas"]),
    ]
    if figures["left_out"]:
        lines.append(f"\nnot sent, as the context has no room for them: {figures['left_out']}")
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


def _replica_lines(replicas: Figures) -> Iterable[str]:
    if not replicas:
        return
    yield f"\n{'replica':<22}{'requests':>10}{'failed':>10}{'TTFT p50':>10}{'p99':>10}" + (
        f"{'compl. p50':>12}{'p99':>10}"
    )
    for name, one in replicas.items():
        ttft, completion = (_cells(one[key], ("p50", "p99")) for key in ("ttft_s", "completion_s"))
        yield f"{name:<22}{one['requests']:>10}{one['failed']:>10}{ttft}  {completion}"


def _cells(distribution: Figures | None, names: Sequence[str]) -> str:
    if distribution is None:
        return "".join(f"{'–':>10}" for _ in names)
    return "".join(f"{distribution[name]:>10.3f}" for name in names)


def _by_replica(sent: Sequence[Sent]) -> Figures:
    """For each replica that said its name."""
    names = sorted({one.replica for one in sent if one.replica})
    return {name: _of_replica([one for one in sent if one.replica == name]) for name in names}


def _of_replica(sent: Sequence[Sent]) -> Figures:
    answered = [one for one in sent if one.error is None]
    failed = len(sent) - len(answered)
    return {"requests": len(sent), "failed": failed, **_latencies(answered)}


def _latencies(answered: Sequence[Sent]) -> Figures:
    return {
        "ttft_s": _distribution([one.ttft_s for one in answered if one.ttft_s is not None]),
        "completion_s": _distribution([one.completion_s for one in answered if one.completion_s]),
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not len(seconds):
        return None
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p95": p95, "p99": p99}


def _tokens(pairs: Iterable[tuple[int, int | None]]) -> dict[str, int]:
    """By the trace and by the server, of the answers that the server counted."""
    counted = [(planned, count) for planned, count in pairs if count is not None]
    planned, server = (sum(column) for column in zip(*counted, strict=True)) if counted else (0, 0)
    return {"planned": planned, "counted": server}


def _warnings(figures: Figures) -> Iterable[str]:
    late, client = figures["late_s"], figures["client"]
    if late and late["p99"] > LATE_S:
        yield (
            f"requests were sent {1000 * late['p99']:.0f} ms late at p99: arrivals were not those "
            "of the trace, do not trust the figures; use an idle machine or a lower --speed"
        )
    if client["busiest_second"] > BUSY:
        yield (
            f"the client used {client['busiest_second']:.0%} of a core in its busiest second: "
            "times are partly its own, do not trust the figures; use a lower --speed"
        )
    yield from _off("prompt", figures["prompt_tokens"], "the server counts words differently")
    yield from _off(
        "output",
        figures["output_tokens"],
        "only simulated replicas generate what the trace says; see --known-lengths",
    )


def _off(what: str, tokens: dict[str, int], why: str) -> Iterable[str]:
    if tokens["planned"] and abs(tokens["counted"] / tokens["planned"] - 1) > _OFF:
        yield (
            f"{what} tokens are {tokens['counted'] / tokens['planned']:.0%} of the trace's: {why}"
        )

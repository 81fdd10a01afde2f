"""Replicas on the dashboard: health, load, latencies and speed of each."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil

import numpy as np

from extproc.ground.text import natural
from extproc.observe.dashboard.page_table import PageColumn, PageTable
from extproc.observe.dashboard.warnings import FROZEN
from extproc.observe.decision_log import ObservedPool, PredictionResult
from extproc.predict.completion import backlog_s
from extproc.predict.inputs import FleetView, Floats
from extproc.replica_state import ReplicaState

_LEAST_SHARED = 3  # fewest decisions for which shares are shown
_UNHEALTHY = "unhealthy"


def replica_table(
    pool: ObservedPool,
    view: FleetView,
    dispatched: Counter[tuple[str, str]],
    ended: Sequence[PredictionResult],
) -> PageTable:
    """List the replicas; cells for load and speed of an unhealthy replica stay empty."""
    fleet, name, now = pool.fleet, pool.config.pool, pool.clock()
    excluded = {each.replica: each.why for each in view.excluded}
    order = sorted(range(len(view)), key=lambda row: natural(view.names[row]))
    ids = [view.ids[row] for row in order]
    states = [fleet.members.by_row[view.rows[row]] for row in order]
    reasons = [excluded.get(replica, "") for replica in ids]
    addresses = [
        f"{'' if state.name == state.id else f'{state.id} '}{', '.join(state.models)}"
        for state in states
    ]
    health = [*map(_health, reasons, states)]
    problems = [*map(partial(_problem, pool), ids, reasons)]
    by_profile = [not state.measured for state in states]
    estimated = [fleet.blocks.count(replica) is None for replica in ids]
    ages = [round(now - fleet.eligibility.conditions[replica].scraped_at, 1) for replica in ids]
    total = dispatched.total()
    enough = total >= _LEAST_SHARED
    shares = [round(dispatched[name, replica] / total, 3) if enough else None for replica in ids]
    warm = [round(fleet.warm_tokens(replica)) for replica in ids]
    with np.errstate(divide="ignore"):
        prefill = 1.0 / view.c_prefill
    decode = view.tokens_per_step / view.decode_step / view.stretch

    def known(values: Sequence[float | None]) -> list[float | None]:
        pairs = zip(health, values, strict=True)
        return [None if word == _UNHEALTHY else value for word, value in pairs]

    def figures(values: Floats) -> list[float | None]:
        return known(values[order].round(3).tolist())

    columns = [
        PageColumn("Replica", "name", [view.names[row] for row in order], notes=addresses),
        PageColumn("Health", "health", health, notes=problems),
        PageColumn("Running", "load", figures(np.maximum(view.requests - view.waiting, 0.0))),
        PageColumn("Waiting", "load", figures(view.waiting)),
        PageColumn("KV", "share", figures(view.kv_usage)),
        PageColumn("Backlog", "seconds", figures(backlog_s(view))),
        PageColumn("×", "ratio", figures(view.stretch)),
        PageColumn("Share", "share", known(shares)),
        PageColumn("Age", "age", ages),
        *_latencies(ended, ids),
        PageColumn("Prefill speed", "tokens", figures(prefill), estimated=by_profile),
        PageColumn("Decode speed", "tokens", figures(decode), estimated=by_profile),
        PageColumn("Warm", "tokens", known(warm), estimated=estimated),
    ]
    return PageTable(f"Replicas of pool {name}", ids, columns)


def _latencies(ended: Sequence[PredictionResult], ids: Sequence[str]) -> Iterator[PageColumn]:
    """Yield columns of latencies, a value for each replica; None: no time is known."""
    completions = defaultdict[str, list[float]](list)
    first_tokens = defaultdict[str, list[float]](list)
    for result in ended:
        completions[result.replica].append(result.actual_s)
        if result.ttft_s is not None:
            first_tokens[result.replica].append(result.ttft_s)
    for title, seconds, q in (
        ("Completion p50", completions, 0.5),
        ("Completion p99", completions, 0.99),
        ("TTFT p99", first_tokens, 0.99),
    ):
        yield PageColumn(title, "seconds", [_nearest_rank(seconds[each], q) for each in ids])


def _nearest_rank(values: Sequence[float], q: float) -> float | None:
    return round(sorted(values)[ceil(q * len(values)) - 1], 3) if values else None


def _health(reason: str, state: ReplicaState) -> str:
    if reason in ("", "draining"):
        return reason or "ok"
    return "excluded" if state.healthy else _UNHEALTHY


def _problem(pool: ObservedPool, replica: str, reason: str) -> str:
    """Say why a replica is excluded or its gauges are ignored, and since when."""
    excluded = pool.exclusions.since([replica])
    if reason == "draining":
        return excluded
    if reason:
        return f"{reason} ({excluded})" if excluded else reason
    if pool.fleet.eligibility.conditions[replica].frozen:
        return f"gauges ignored: they do not move ({pool.onsets.since(FROZEN, [replica])})"
    return ""

"""Snapshot for the dashboard: tables, with title, unit and values of each column."""

import asyncio
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from math import inf, isnan
from typing import Any

import numpy as np
from msgspec import Struct

from extproc.ground.clock import time_of_day
from extproc.ground.text import Column, natural, row_of
from extproc.observe.changes import Presence
from extproc.observe.dashboard.observed import observed_requests, steering
from extproc.observe.dashboard.warnings import (
    pool_warnings,
    redis_lost,
    router_warnings,
    worst_first,
)
from extproc.observe.decision import FORMAT
from extproc.observe.decision_log import DecisionLog, ObservedPool, PredictionResult
from extproc.observe.explain import DECISIONS, reason_of
from extproc.observe.history import SPANS_S
from extproc.predict.completion import backlog_s
from extproc.predict.inputs import FleetView, Floats
from extproc.replica_state import ReplicaState
from extproc.route.waiting import Waiting

_RECENT_S = 60.0  # seconds over which decisions are counted
_COMPARED_S = 300.0  # seconds over which predictions are compared with actual times
_LEAST_SHARED = 3  # decisions in the last minute below which no shares are shown
_DECISIONS_LISTED = 12
_UNKNOWN = "-: the request still runs, or the router did not read its response to the end."
_POINTS = 500
_GROUPS = 50  # groups of queued requests listed: there may be as many tenants as users


class PageColumn(Struct, omit_defaults=True):
    """Column of a table; the unit tells browser and terminal how to show the values."""

    title: str
    unit: str  # a key of UNITS in page/table.js
    values: list[Any]
    notes: list[str] = []  # small print below each value
    estimated: list[bool] = []  # values to be marked with ≈


class PageTable(Struct):
    """Table for the page. A row with the same key in the next snapshot replaces the row in
    place."""

    caption: str
    keys: list[Any]
    columns: list[PageColumn]
    note: str = ""  # below the rows


async def snapshot(pools: Sequence[ObservedPool]) -> dict[str, Any]:
    """Describe the pools of a router for JSON; infinite figures become null.

    A thousand replicas take 15 ms; other tasks run between two pools.
    """
    first = pools[0]
    dispatched, history, age_s = _dispatched(first), first.history.rows(), first.history.age_s
    shown, usable, replicas, since = [], 0, 0, first.clock() - _COMPARED_S
    warnings = [("", warning) for warning in router_warnings(pools)]
    for pool in pools:
        view, name = pool.fleet.overview(), pool.config.pool
        ended = [*takewhile(lambda result: result.at >= since, reversed(pool.results))]
        prefix = f"Pool {name}: " if len(pools) > 1 else ""
        warnings += [(prefix, warning) for warning in pool_warnings(pool, view, ended)]
        usable += len(view) - len({replica.id for replica in view.excluded} & {*view.ids})
        replicas += len(view)
        shown.append(
            {
                "name": name,
                "replicas": _replicas(pool, view, dispatched),
                "waiting": _waiting(pool, view),
                "accuracy": _accuracy(ended),
            }
        )
        await asyncio.sleep(0)
    observed_figures, observed_facts = observed_requests(first.log)
    return {
        "version": FORMAT,
        "router": f"router on {platform.node()}, {first.config.serve.admin}",
        "warnings": worst_first(warnings),
        "figures": [
            ("replicas in use", f"{usable} of {replicas}"),
            ("requests in flight", f"{sum(pool.fleet.in_flight for pool in pools):,}"),
            ("waiting at this router", f"{sum(len(pool.queue) for pool in pools):,}"),
            ("requests a second", f"{history[0][0]:.1f}"),
            *observed_figures,
        ],
        "facts": [
            *_facts(pools),
            ("Policy", first.config.route.policy + steering(first.config.serve)),
            *observed_facts,
        ],
        "pools": shown,
        "history": _history(history, age_s, first.wall() - age_s),
        "decisions": _decisions(first.log),
    }


def text_table(
    caption: str,
    keys: list[Any],
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    units: Mapping[str, str],
) -> PageTable:
    """Convert a table of ``explain``; ``units``: by title, the units of columns that are neither
    text nor figure."""
    converted = list[PageColumn]()
    for at, column in enumerate(columns):
        title = column.header
        if title == "actual":
            title = f"{converted[-1].title.removesuffix(' s')} actual"
        unit = units.get(title, "text" if column.left else "figure")
        converted.append(PageColumn(title, unit, [row[at] for row in rows]))
    return PageTable(caption, keys, converted)


def _replicas(
    pool: ObservedPool, view: FleetView, dispatched: Counter[tuple[str, str]]
) -> PageTable:
    fleet, name, now = pool.fleet, pool.config.pool, pool.clock()
    excluded = {replica.id: replica.why for replica in view.excluded}
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
    ages = [round(now - fleet.eligibility.scraped_at(replica), 1) for replica in ids]
    total = dispatched.total()
    enough = total >= _LEAST_SHARED
    shares = [round(dispatched[name, replica] / total, 3) if enough else None for replica in ids]
    warm = [round(fleet.warm_tokens(replica)) for replica in ids]
    with np.errstate(divide="ignore"):
        prefill = 1.0 / view.c_prefill
    decode = view.tokens_per_step / view.decode_step / view.stretch

    def figures(values: Floats) -> list[float]:
        return [*values[order].round(3).tolist()]

    columns = [
        PageColumn("Replica", "name", [view.names[row] for row in order], notes=addresses),
        PageColumn("Health", "health", health, notes=problems),
        PageColumn("Running", "load", figures(np.maximum(view.requests - view.waiting, 0.0))),
        PageColumn("Waiting", "load", figures(view.waiting)),
        PageColumn("KV", "share", figures(view.kv_usage)),
        PageColumn("Backlog", "seconds", figures(backlog_s(view))),
        PageColumn("×", "ratio", figures(view.stretch)),
        PageColumn("Share", "share", shares),
        PageColumn("Age", "age", ages),
        PageColumn("Prefill speed", "tokens", figures(prefill), estimated=by_profile),
        PageColumn("Decode speed", "tokens", figures(decode), estimated=by_profile),
        PageColumn("Warm", "tokens", warm, estimated=estimated),
    ]
    return PageTable(f"Replicas of pool {name}", ids, columns)


def _health(reason: str, state: ReplicaState) -> str:
    if reason in ("", "draining"):
        return reason or "ok"
    return "excluded" if state.healthy else "unhealthy"


def _problem(pool: ObservedPool, replica: str, reason: str) -> str:
    """Say why a replica is excluded and since when, or that its gauges are ignored."""
    if reason and (since := pool.exclusions.since(replica)):
        return f"since {since}" if reason == "draining" else f"{reason} (since {since})"
    frozen = "its gauges do not move: ignored" if pool.fleet.eligibility.frozen(replica) else ""
    return "" if reason == "draining" else reason or frozen


def _dispatched(pool: ObservedPool) -> Counter[tuple[str, str]]:
    """Count the decisions of the last minute by pool and replica."""
    records = pool.log.since(pool.wall() - _RECENT_S)
    return Counter((record.pool, record.decision.replica) for record in records)


def _waiting(pool: ObservedPool, view: FleetView) -> PageTable:
    """List the queue by priority, tenant and model, the highest priority first."""
    names = dict(zip(view.ids, view.names, strict=True))
    groups = defaultdict[tuple[int, str, str], list[Waiting]](list)
    for request in pool.queue:  # the oldest first
        groups[-request.priority, request.tenant, request.model].append(request)
    listed = dict(sorted(groups.items())[:_GROUPS])
    keys, queued, now = list(listed), list(listed.values()), pool.clock()
    awaited = [_awaited(group, names) for group in queued]
    columns = [
        PageColumn("Tenant", "name", [tenant or "–" for _, tenant, _ in keys]),
        PageColumn("Priority", "count", [-negated for negated, _, _ in keys]),
        PageColumn("Model", "text", [model for _, _, model in keys]),
        PageColumn("Requests", "count", [len(group) for group in queued]),
        PageColumn("Longest", "seconds", [round(now - group[0].since, 1) for group in queued]),
        PageColumn("For replica", "words", awaited),
    ]
    target = f"for replicas of pool {pool.config.pool}"
    note = "" if queued else f"Nothing waits {target}: every request is dispatched at once."
    if more := len(pool.queue) - sum(map(len, queued)):
        note = f"And {more:,} more."
    return PageTable(f"Waiting {target}", [" ".join(map(str, key)) for key in keys], columns, note)


def _awaited(group: Sequence[Waiting], names: Mapping[str, str]) -> str:
    counts = Counter(names.get(request.replica, request.replica) or "any" for request in group)
    return ", ".join(f"{name} ({number})" for name, number in counts.items())


def _accuracy(ended: Sequence[PredictionResult]) -> dict[str, Any]:
    """Pair the predicted and actual seconds of the last requests; ``ended``: newest first."""
    pairs = ((result.actual_s, result.predicted_s) for result in ended)
    ratios = [actual / predicted for actual, predicted in pairs if 0.0 < predicted < inf]
    if not ratios:
        words = f"The router saw the end of no request in the last {_COMPARED_S / 60:.0f} minutes."
        return {"words": words, "quantiles": [], "points": []}
    low, middle, high = quantiles = np.percentile(ratios, (10, 50, 90)).tolist()
    words = (
        f"Of the last {len(ratios):,} requests that ended, half took at most {middle:.2f} times "
        f"the predicted time, and eight of ten took {low:.2f} to {high:.2f} times."
    )
    # A hash selects one of ``stride`` requests, so that each snapshot draws the same points.
    stride = 1 << (len(ended) // _POINTS).bit_length()
    points = [
        (round(result.predicted_s, 3), round(result.actual_s, 3))
        for result in ended
        if hash((result.at, result.actual_s)) % stride == 0  # hash(float) is not random
    ]
    return {"words": words, "quantiles": quantiles, "points": points}


def _facts(pools: Sequence[ObservedPool]) -> Iterator[tuple[str, str]]:
    for pool in pools:
        fleet, of = pool.fleet, f" of {pool.config.pool}" if len(pools) > 1 else ""
        unknown = "unknown: Redis does not answer"
        others = ", ".join(fleet.peers.addresses)
        routers = "this router alone"
        if redis_lost(pool):
            routers = f"{unknown}; last heard: {others}" if others else unknown
        elif others:
            routers = f"this router and {len(fleet.peers)} more: {others}"
            if fleet.peers.digest_age is not None:
                routers += f", newest digest {fleet.peers.digest_age:.2f} s old"
        yield f"Routers{of}", _with_gone(routers, pool.routers)
        if pool.config.state != "redis":
            pollers = "this router polls the replicas itself"
        elif redis_lost(pool):
            pollers = unknown
        elif pool.delays.redis_refusal:
            pollers = "unknown: Redis stores nothing"
        else:
            pollers = ", ".join(fleet.pollers or ()) or "none reaches Redis"
        yield f"Pollers{of}", _with_gone(pollers, pool.pollers)


def _with_gone(alive: str, presence: Presence) -> str:
    return f"{alive}; left: {presence.gone}" if presence.gone else alive


def _history(rows: Sequence[tuple[float, ...]], age_s: float, started_at: float) -> PageTable:
    """Compare the last minute, ten minutes and hour of a router of this age."""
    names = ["minute", "10 minutes", "hour"]
    rate, failed, refused, *times = map(list, zip(*rows, strict=True))
    columns = [
        PageColumn("Last", "name", names),
        PageColumn("Requests/s", "ratio", rate),
        PageColumn("5xx count", "count", failed),
        PageColumn("429 count", "count", refused),
    ]
    titles = [f"{time} {q}" for time in ("TTFT", "TPOT", "Completion") for q in ("p50", "p99")]
    columns += [
        PageColumn(title, "seconds" if "TPOT" not in title else "milliseconds", values)
        for title, values in zip(titles, _shown(times), strict=True)
    ]
    note = f"This router started at {time_of_day(started_at)}: longer periods begin then."
    return PageTable("Last hour", names, columns, note if age_s < SPANS_S[-1] else "")


def _shown(times: Sequence[list[float]]) -> Iterator[list[float | None]]:
    """Yield the values of each column of times, TPOT in milliseconds; None for unknown times."""
    factors = (1.0, 1.0, 1e3, 1e3, 1.0, 1.0)
    for values, factor in zip(times, factors, strict=True):
        yield [None if isnan(value) else round(value * factor, 3) for value in values]


def _decisions(log: DecisionLog) -> PageTable:
    records = [decision.record(0) for decision in reversed(log.last(_DECISIONS_LISTED))]
    numbers, columns = [record.number for record in records], [column for column, _ in DECISIONS]
    rows = [row_of(DECISIONS, record) for record in records]
    table = text_table("Last decisions", numbers, columns, rows, {"request": "decision"})
    table.columns.append(PageColumn("model: why", "words", list(map(reason_of, records))))
    table.note = _UNKNOWN if records else ""
    return table

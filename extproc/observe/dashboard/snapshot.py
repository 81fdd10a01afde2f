"""Snapshot of a router for the dashboard, as JSON."""

import asyncio
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import inf, isnan
from statistics import fmean
from typing import Any

import numpy as np

from extproc.config import Config
from extproc.ground.address import within_reach
from extproc.ground.clock import time_of_day
from extproc.ground.text import figure
from extproc.observe.changes import Presence
from extproc.observe.dashboard.page_table import PageColumn, PageTable, text_table
from extproc.observe.dashboard.replica_table import replica_table
from extproc.observe.dashboard.warnings import Costly, pool_warnings, redis_lost, router_warnings
from extproc.observe.decision import FORMAT
from extproc.observe.decision_log import DecisionLog, ObservedPool, PredictionResult
from extproc.observe.explain import DECISIONS, reason_of
from extproc.observe.history import RATES, SPANS_S
from extproc.predict.inputs import FleetView
from extproc.route.waiting import Waiting

_RECENT_S = 60.0  # seconds over which decisions are counted
_COMPARED_S = 300.0  # seconds over which latencies are shown and predictions compared
_SOUGHT = 1000  # last decisions, among which observed requests are sought
_DECISIONS_LISTED = 12
_UNKNOWN = "-: the request still runs, or the router did not read its response to the end."
_POINTS = 500
_MILLISECONDS = "TPOT p50", "TPOT p99"  # figures of the history; other times are seconds
_GROUPS = 50  # most groups of queued requests shown: there may be many tenants
Pairs = list[tuple[str, str]]  # names and texts of figures or facts


async def snapshot(pools: Sequence[ObservedPool]) -> dict[str, Any]:
    """Describe the pools of a router for JSON; infinite figures become null.

    A thousand replicas take 15 ms; other tasks run between two pools.
    """
    first = pools[0]
    history, age_s = first.history.figures(), first.history.age_s
    lately = first.log.since(first.wall() - _RECENT_S)
    dispatched = Counter((record.pool, record.decision.replica) for record in lately)
    shown, usable, replicas, since = [], 0, 0, first.clock() - _COMPARED_S
    warnings = [("", warning) for warning in router_warnings(pools)]
    for pool in pools:
        view, name = pool.fleet.overview(), pool.config.pool
        ended = [*takewhile(lambda result: result.at >= since, reversed(pool.results))]
        prefix = f"Pool {name}: " if len(pools) > 1 else ""
        warnings += [(prefix, warning) for warning in pool_warnings(pool, view, ended)]
        usable += len(view) - len(view.excluded)
        replicas += len(view)
        shown.append(
            {
                "name": name,
                "replicas": replica_table(pool, view, dispatched, ended),
                "waiting": _waiting(pool, view),
                "accuracy": _accuracy(ended),
            }
        )
        await asyncio.sleep(0)
    warnings.sort(key=lambda pair: not isinstance(pair[1], Costly))  # the worst first
    observed_figures, observed_facts = _observed(first.log)
    return {
        "version": FORMAT,
        "router": f"router on {platform.node()}, {first.config.serve.admin}",
        "warnings": [prefix + warning for prefix, warning in warnings],
        "figures": [
            ("replicas in use", f"{usable} of {replicas}"),
            ("requests in flight", f"{sum(pool.fleet.in_flight for pool in pools):,}"),
            ("waiting at this router", f"{sum(len(pool.queue) for pool in pools):,}"),
            ("requests a second", f"{history['Requests/s'][0]:.1f}"),
            *observed_figures,
        ],
        "facts": [
            *_facts(pools),
            ("Policy", _policy(first.config)),
            *observed_facts,
        ],
        "links": _links(pools),
        "pools": shown,
        "history": _history(history, age_s, first.wall() - age_s),
        "decisions": _decisions(first.log),
    }


def _waiting(pool: ObservedPool, view: FleetView) -> PageTable:
    """List the queue in groups of priority, tenant and model, the highest priority first."""
    names = dict(zip(view.ids, view.names, strict=True))
    groups = defaultdict[tuple[int, str, str], list[Waiting]](list)
    for request in pool.queue:  # the oldest first
        groups[-request.priority, request.tenant, request.model].append(request)
    listed = dict(sorted(groups.items())[:_GROUPS])
    keys, queued, now = list(listed), list(listed.values()), pool.clock()
    columns = [
        PageColumn("Tenant", "name", [tenant or "–" for _, tenant, _ in keys]),
        PageColumn("Priority", "count", [-negated for negated, _, _ in keys]),
        PageColumn("Model", "text", [model for _, _, model in keys]),
        PageColumn("Requests", "count", [len(group) for group in queued]),
        PageColumn("Longest", "seconds", [round(now - group[0].since, 1) for group in queued]),
        PageColumn("For replica", "words", [_awaited(group, names) for group in queued]),
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
    """Compare predicted with actual completions, in words and as points of a scatter plot."""
    ratios = [each.actual_s / each.predicted_s for each in ended if 0.0 < each.predicted_s < inf]
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


def _observed(log: DecisionLog) -> tuple[Pairs, Pairs]:
    """Compare the router's choices with Envoy's, for observed requests of the last 1,000 decisions.

    Returns figures and facts. The figures are empty until an observed request was answered. The
    facts are empty until the router saw the end of an observed request.
    """
    served = [
        (record.decision, record.outcome.served_by, record.outcome.completion_s)
        for record in log.last(_SOUGHT)
        if record.observed and record.outcome.served_by is not None
    ]
    if not served:
        return [], []
    elsewhere = sum(replica != decision.replica for decision, replica, _ in served)
    figures = [("observed requests that Envoy sent elsewhere", f"{elsewhere:,} of {len(served):,}")]
    times = [
        (decision.predicted_completion, on_envoys.predicted_completion, completion_s)
        for decision, replica, completion_s in served
        if completion_s is not None and (on_envoys := decision.on(replica)) is not None
    ]
    finite = [row for row in times if max(row) < inf]
    if not finite:
        return figures, []
    by_router, by_envoy, actual = map(fmean, zip(*finite, strict=True))
    text = (
        f"mean completion of {len(finite):,} requests: predicted {figure(by_router)} s for the "
        f"router's choices and {figure(by_envoy)} s for Envoy's, actual {figure(actual)} s"
    )
    return figures, [("Observed requests", text)]


def _policy(config: Config) -> str:
    """Name the policy, and which requests the router steers unless it steers all."""
    serve, which = config.serve, ""
    if serve.mode == "observe":
        which = " (observes: Envoy chooses)"
    elif serve.share < 1.0:
        which = f" (for {100.0 * serve.share:.3g}% of the requests)"
    return config.route.policy + which


def _facts(pools: Sequence[ObservedPool]) -> Iterator[tuple[str, str]]:
    for pool in pools:
        fleet, of = pool.fleet, f" of {pool.config.pool}" if len(pools) > 1 else ""
        unknown = "unknown: Redis does not answer"
        others, age_s = ", ".join(fleet.peers.addresses), fleet.peers.digest_age
        routers = "this router alone"
        if redis_lost(pool):
            routers = f"{unknown}; last heard: {others}" if others else unknown
        elif age_s is not None:
            routers = (
                f"this router and {len(fleet.peers)} more: {others}, "
                f"newest digest {age_s:.2f} s old"
            )
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


def _links(pools: Sequence[ObservedPool]) -> dict[str, str]:
    """Map other routers (host and port) to the URLs of their pages; omit pages out of reach."""
    scheme = "https" if pools[0].config.admin.tls_cert else "http"
    return {
        name: f"{scheme}://{admin}/"
        for pool in pools
        for name, admin in pool.fleet.peers.admins.items()
        if within_reach(admin, name)
    }


def _with_gone(alive: str, presence: Presence) -> str:
    return f"{alive}; left: {presence.gone}" if presence.gone else alive


def _history(figures: Mapping[str, Sequence[float]], age_s: float, started_at: float) -> PageTable:
    """Make a table of :meth:`History.figures`, with a note on a router younger than an hour."""
    names = [*SPANS_S]
    columns = [PageColumn("Last", "name", names)]
    for title, values in figures.items():
        if title in RATES:
            columns.append(PageColumn(title, "figure", [*map(_rate, values)]))
        else:
            unit, factor = ("milliseconds", 1e3) if title in _MILLISECONDS else ("seconds", 1.0)
            times = [None if isnan(value) else round(value * factor, 3) for value in values]
            columns.append(PageColumn(title, unit, times))
    note = f"This router started at {time_of_day(started_at)}: longer periods begin then."
    return PageTable("Last hour", names, columns, note if age_s < SPANS_S["hour"] else "")


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _decisions(log: DecisionLog) -> PageTable:
    records = [decision.record(0) for decision in reversed(log.last(_DECISIONS_LISTED))]
    numbers = [record.number for record in records]
    table = text_table("Last decisions", numbers, DECISIONS, records, {"request": "decision"})
    table.columns.append(PageColumn("model: why", "words", list(map(reason_of, records))))
    table.note = _UNKNOWN if records else ""
    return table

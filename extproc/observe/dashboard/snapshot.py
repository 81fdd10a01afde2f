"""What the page shows at one moment."""

import asyncio
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from extproc.observe.dashboard.warnings import pool_warnings, router_warnings
from extproc.observe.decision_log import DecisionLog, ObservedPool, PredictionResult
from extproc.observe.explain import DECISIONS, figures_of, reason_of
from extproc.predict.completion import backlog_s
from extproc.predict.inputs import FleetView
from extproc.route.queue import Queue
from extproc.route.waiting import Waiting

_LATELY_S = 60.0
"""Seconds over which decisions are counted."""
_MINUTES_S = 300.0
"""Seconds over which predictions are compared with what came of them."""
_LISTED = 12
"""Of the last decisions."""
_POINTS = 500
"""Requests that are drawn, at most."""
_GROUPS = 50
"""Of what waits, at most: tenants may be as many as users."""


async def snapshot(pools: Sequence[ObservedPool]) -> dict[str, Any]:
    """All of it, of the pools of one router, in what JSON has: seconds, tokens, and what JSON
    cannot say (infinity) for what is not known. Piece by piece: a thousand replicas take 15 ms, and
    requests come first."""
    first = pools[0]
    serve = first.config.serve
    sent, seconds = _sent(first)
    shown = []
    for pool in pools:
        shown.append(_pool(pool, sent))
        await asyncio.sleep(0)
    return {
        "router": {
            "host": platform.node(),
            "admin": serve.admin,
            "workers": serve.workers,
            "policy": first.config.route.policy,
            "polls": first.config.state == "memory",
        },
        "warnings": [*router_warnings(pools)],
        "decisions_s": seconds,
        "decisions": _decisions(first.log),
        "pools": shown,
    }


def _pool(pool: ObservedPool, sent: Counter[tuple[str, str]]) -> dict[str, Any]:
    fleet = pool.fleet
    view = fleet.overview()
    ended = [*pool.accuracy.since(pool.clock() - _MINUTES_S)]
    return {
        "name": pool.config.pool,
        "warnings": [*pool_warnings(pool, view, ended)],
        "in_flight": fleet.in_flight,
        "other_routers": len(fleet.peers),
        "others_age_s": fleet.peers.news_age,
        "pollers": fleet.pollers,
        "replicas": _replicas(pool, view, sent),
        "waiting": len(pool.queue),
        "held": _held(pool.queue, view, pool.clock()),
        **_accuracy(ended, pool.accuracy.added),
    }


def _replicas(
    pool: ObservedPool, view: FleetView, sent: Counter[tuple[str, str]]
) -> dict[str, list[Any]]:
    """Column by column, an entry a replica."""
    fleet, now = pool.fleet, pool.clock()
    against = {one.id: one.why for one in view.excluded}
    states = [fleet.members.by_row[row] for row in view.rows]
    with np.errstate(divide="ignore"):
        prefill = 1.0 / view.c_prefill
    return {
        "replica": view.ids,
        "name": view.names,
        "models": [", ".join(state.models) for state in states],
        "why_not": [against.get(name, "") for name in view.ids],
        "healthy": [state.healthy for state in states],
        "running": np.maximum(view.requests - view.waiting, 0.0).round(3).tolist(),
        "waiting": view.waiting.round(3).tolist(),
        "kv_usage": view.kv_usage.round(3).tolist(),
        "warm_tokens": [round(fleet.warm_tokens(name)) for name in view.ids],
        "warm_known": [fleet.blocks.count(name) is not None for name in view.ids],
        "backlog_s": backlog_s(view).round(3).tolist(),
        "prefill_per_s": prefill.round(3).tolist(),
        "decode_per_s": (view.tokens_per_step / view.decode_step / view.stretch).round(3).tolist(),
        "measured": [state.measured for state in states],
        "stretch": view.stretch.round(3).tolist(),
        "sent": [sent[pool.config.pool, name] for name in view.ids],
        "news_age_s": [round(now - fleet.eligibility.heard_at(name), 1) for name in view.ids],
    }


def _sent(pool: ObservedPool) -> tuple[Counter[tuple[str, str]], float]:
    """Of late, how many requests went to each pool and replica; and in how many seconds."""
    now = pool.wall()
    records = pool.log.since(now - _LATELY_S)
    sent = Counter((one.pool, one.decision.replica) for one in records)
    kept = pool.log.after(0, 1)
    if records and records[-1].number == kept[0].number > 1:  # there were more
        return sent, max(now - records[-1].decided_at, 1.0)
    return sent, _LATELY_S


def _held(queue: Queue, view: FleetView, now: float) -> list[dict[str, Any]]:
    """What waits at the router, by whose it is, in the order of priorities."""
    names = dict(zip(view.ids, view.names, strict=True))
    groups = defaultdict[tuple[int, str, str], list[Waiting]](list)
    for one in queue:  # the oldest first
        groups[-one.priority, one.tenant, one.model].append(one)
    return [
        {
            "priority": -less,
            "tenant": tenant,
            "model": model,
            "requests": len(held),
            "longest_s": round(now - held[0].since, 1),
            "replicas": Counter(names.get(one.replica, one.replica) for one in held),
        }
        for (less, tenant, model), held in sorted(groups.items())[:_GROUPS]
    ]


def _accuracy(ended: Sequence[PredictionResult], added: int) -> dict[str, Any]:
    """Predicted and actual seconds of the last requests, the newest first, and how far apart they
    are; ``added``: the number of the newest."""
    pairs = ((one.actual_s, one.predicted_s) for one in ended)
    ratios = np.array([actual / predicted for actual, predicted in pairs if 0.0 < predicted < inf])
    low, middle, high = np.percentile(ratios, (10, 50, 90)) if len(ratios) else (None,) * 3
    # Always the same ones, so that a point stays where it is.
    one_in = 1 << (len(ended) // _POINTS).bit_length()
    return {
        "ended": len(ratios),
        "actual_to_predicted": {"p10": low, "p50": middle, "p90": high},
        "points": [
            [round(one.predicted_s, 3), round(one.actual_s, 3)]
            for place, one in enumerate(ended)
            if (added - place) % one_in == 0
        ],
    }


def _decisions(log: DecisionLog) -> dict[str, Any]:
    """As ``extproc explain`` lists them, the newest first."""
    records = [one.record(0) for one in reversed(log.last(_LISTED))]
    return {
        "columns": DECISIONS,
        "rows": [
            {"number": one.number, "figures": figures_of(one), "why": reason_of(one)}
            for one in records
        ],
    }

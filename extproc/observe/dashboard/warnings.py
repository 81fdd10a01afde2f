"""Warnings of the dashboard, in words.

A warning keeps its words for as long as its cause lasts: a screen reader reads new ones aloud.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from extproc.observe.decision_log import ObservedPool, PredictionResult
from extproc.predict.inputs import FleetView
from extproc.replica_state import SILENT_AFTER_S

_MOST_REASONS, _MOST_NAMES = 5, 3
_DRIFT = 1.5  # decode time ÷ predicted, against that of the other replicas
_ENOUGH_TOKENS = 5_000.0  # expected in a prefix cache before it is judged
_FOUND = 0.5  # share that it should find of them
_LATELY_S = 60.0
_NEARLY = 0.9  # of a limit


def router_warnings(pools: Sequence[ObservedPool]) -> Iterator[str]:
    """Warn of limits of the router as a whole."""
    most = pools[0].config.serve.max_streams
    if sum(pool.fleet.in_flight + len(pool.queue) for pool in pools) >= _NEARLY * most:
        yield (
            f"This router is nearly full: it looks after at most {most} requests at a time "
            "(serve.max_streams), and Envoy goes on with further ones without it."
        )
    lately = pools[0].log.since(pools[0].wall() - _LATELY_S)
    if any(one.outcome.overloaded for one in lately):
        yield (
            "A circuit breaker of Envoy was full in the last minute: it answered 503 itself. Raise "
            "its limits (circuit_breakers)."
        )


def pool_warnings(
    pool: ObservedPool, view: FleetView, ended: Sequence[PredictionResult]
) -> Iterator[str]:
    """Warn of one pool; ``view`` holds all its replicas, ``ended`` its last requests."""
    yield from _stale(pool)
    yield from _left_out(pool, view)
    yield from _drifts(view)
    yield from _cold_caches(view, ended)
    yield from _full_queue(pool)


def _stale(pool: ObservedPool) -> Iterator[str]:
    fleet, shares = pool.fleet, pool.config.state == "redis"
    if shares and fleet.pollers is None:
        yield "Redis does not answer: this router goes by what it knew and what it sends itself."
    elif shares and not fleet.pollers:
        yield "No poller is alive: start one (extproc poll)."
    if not fleet.members:
        yield "No replica is known yet: Envoy's own load balancing serves."
    elif pool.clock() - fleet.eligibility.silence.heard_at > SILENT_AFTER_S:
        yield f"Stale news: nothing was heard of any replica for more than {SILENT_AFTER_S:.0f} s."
    if fleet.peers.stale:
        yield "Stale news of other routers: what they have in flight is known from polls alone."


def _left_out(pool: ObservedPool, view: FleetView) -> Iterator[str]:
    members, reasons = pool.fleet.members, defaultdict[str, list[str]](list)
    for one in view.excluded:
        state = members.get(one.id)
        if state is None or not state.draining:
            reasons[one.why].append(one.name)
    if len(view) and not any(state.healthy for state in members):
        yield "No replica is healthy: Envoy's own load balancing serves."
    by_size = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    for why, names in by_size[:_MOST_REASONS]:
        yield f"{_listed(names)} left out: {why}."
    if rest := sum(len(names) for _, names in by_size[_MOST_REASONS:]):
        yield f"{rest} more left out, each for a reason of its own."


def _drifts(view: FleetView) -> Iterator[str]:
    """Warn of replicas whose times differ from the prediction unlike those of the others."""
    if not len(view):
        return
    low, high = (np.quantile(view.stretch, 0.5, method=which) for which in ("lower", "higher"))
    for word, drifting in (
        ("longer", view.stretch > _DRIFT * max(low, 1.0)),
        ("shorter", view.stretch < min(high, 1.0) / _DRIFT),
    ):
        if names := [view.names[place] for place in drifting.nonzero()[0].tolist()]:
            yield (
                f"{_listed(names)} drifting from the prediction: answers take much {word} than the "
                "speed that was measured says."
            )


def _cold_caches(view: FleetView, ended: Sequence[PredictionResult]) -> Iterator[str]:
    sums = {replica: [0.0, 0.0] for replica in view.ids}  # tokens expected, and found
    for one in ended:
        if one.cached is not None and (tokens := sums.get(one.replica)):
            tokens[0] += one.expected_cached
            tokens[1] += one.cached
    cold = [
        name
        for name, (expected, found) in zip(view.names, sums.values(), strict=True)
        if expected >= _ENOUGH_TOKENS and found < _FOUND * expected
    ]
    if cold:
        yield (
            f"{_listed(cold)} not finding in the prefix cache half of what was sent there before: "
            "is the cache on, and large enough?"
        )


def _full_queue(pool: ObservedPool) -> Iterator[str]:
    hold = pool.config.hold
    if len(pool.queue) >= _NEARLY * hold.most:
        yield f"Nearly as many requests wait as may ({hold.most}, hold.most): others get 429."
    oldest = next(iter(pool.queue), None)
    if oldest is not None and pool.clock() - oldest.since > hold.longest_s / 2:
        yield (
            f"Requests have waited for more than half of the {hold.longest_s:g} s after which they "
            "are refused (hold.longest_s): there are too few replicas."
        )


def _listed(names: Sequence[str]) -> str:
    """Join names: ``a is``; ``a and b are``; ``a, b, c and 9 more are``."""
    shown = [*names[:_MOST_NAMES]]
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    *first, last = shown
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"

"""Warnings of the dashboard.

The text of a warning stays the same while its cause lasts, because a screen reader reads a new text
aloud.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from statistics import median_high

import numpy as np

from extproc.ground.text import natural
from extproc.observe.changes import Presence
from extproc.observe.decision import NotFollowed
from extproc.observe.decision_log import OVERLOADED, ObservedPool, PredictionResult
from extproc.predict.inputs import FleetView
from extproc.predict.step import profile_or_default
from extproc.replica_state import STALE_AFTER_S, ReplicaState

FROZEN = "frozen"  # a cause, as in :class:`~extproc.observe.changes.Onsets`
_MOST_REASONS, _MOST_NAMES = 5, 3
_DRIFT = 1.5  # actual ÷ predicted decode time, relative to the other replicas
_SLOW = 0.67  # speed, relative to the other replicas of the same profile
_WRONG_PROFILE = 2.0  # speed, relative to the profile
_ENOUGH_TOKENS = 5_000.0  # fewest expected prompt tokens by which a prefix cache is judged
_FOUND = 0.5  # least share of the expected tokens that a working prefix cache finds
_LATELY_S = 60.0
_NOT_FOLLOWED = {
    NotFollowed.FALLBACK: "Envoy's fallback policy chose, because no choice reached the "
    "replicas' cluster (extproc check --envoy-admin names the cause)",
    NotFollowed.UNKNOWN_ADDRESS: "the chosen address is no member of Envoy's cluster, or Envoy "
    "avoids the address",
    NotFollowed.OTHER_FILTER: "another filter changed the choice after ext_proc",
}
_NEARLY = 0.9  # share of a limit from which on a warning is shown
_SLOW_LOOP_S = 0.02  # mean delay of the event loop: a request waits for the loop several times
_SLOW_REDIS_S = 0.02  # mean round trip
_OWN_DELAYS = 4.0  # a round trip of up to this many loop delays is not the fault of Redis
_EXTERNAL = 1.0  # requests that no router sent; polls and ledgers differ by less


class Costly(str):
    """Warning of a fault that costs requests now: requests fail, are refused, or are not routed."""


def router_warnings(pools: Sequence[ObservedPool]) -> Iterator[str]:
    """Yield warnings about limits of the whole router."""
    most = pools[0].config.serve.max_streams
    if sum(pool.fleet.in_flight + len(pool.queue) for pool in pools) >= _NEARLY * most:
        yield Costly(
            f"This router is nearly full: beyond {most} requests in flight (serve.max_streams), "
            "Envoy serves requests without this router. Run more routers."
        )
    delays = pools[0].delays
    if delays.loop_delay_s.value > _SLOW_LOOP_S:
        yield (
            "This router is slow: its event loop runs late. Give it more CPU, or run more routers."
        )
    elif delays.redis_s.value > max(_SLOW_REDIS_S, _OWN_DELAYS * delays.loop_delay_s.value):
        yield (
            "Redis is slow: routers learn late of each other's requests. Use a nearer Redis, or "
            "give it more CPU."
        )
    if refusal := delays.redis_refusal.rstrip("."):
        yield (
            f"Redis stores nothing: {refusal}. A new poller does not get ready. Read the log of "
            "Redis, or give it more memory (maxmemory)."
        )
    if any(_lately(pool, OVERLOADED) for pool in pools):
        yield Costly(
            "A circuit breaker of Envoy was full in the last minute: Envoy answered 503 itself. "
            "Raise the limits of the breaker (circuit_breakers)."
        )


def redis_lost(pool: ObservedPool) -> bool:
    """Return True if the router is cut off from Redis, and so knows no other process."""
    return pool.config.state == "redis" and pool.fleet.pollers is None


def pool_warnings(
    pool: ObservedPool, view: FleetView, ended: Sequence[PredictionResult]
) -> Iterator[str]:
    """Find warnings about a pool, from all its replicas and its requests that ended lately."""
    return chain(
        _excluded(pool, view),
        _not_followed(pool),
        _cold_caches(view, ended),
        figure_warnings(pool, view),
    )


def figure_warnings(pool: ObservedPool, view: FleetView) -> Iterator[str]:
    """Find the warnings about a pool, except warnings whose cause has log lines of its own."""
    return chain(
        _stale(pool),
        _lost(pool.routers, "Envoy uses the other routers."),
        _lost(pool.pollers, "The other pollers scrape its replicas.") if pool.fleet.pollers else (),
        _pollers(pool),
        _external(pool),
        _frozen(pool),
        _slow(pool),
        _drifts(pool, view),
        _full_queue(pool),
    )


def _stale(pool: ObservedPool) -> Iterator[str]:
    """Yield a warning if states are stale or missing, with the cause if known."""
    fleet, lost = pool.fleet, redis_lost(pool)
    no_poller = fleet.pollers == {} and not pool.delays.redis_refusal
    if lost:
        yield (
            "Redis does not answer: this router knows only the last polls and its own requests. "
            "Restart Redis, or check the connection to it (extproc check --live)."
        )
    elif no_poller:
        yield (
            "No poller reaches Redis: no poller runs, or all hang or are cut off from Redis. If "
            "a poller's /livez answers, check its connection to Redis; else run 'extproc poll'."
        )
    if not fleet.members and fleet.is_empty:
        lately = "requests for models that replicas served in the last hour"
        yield Costly(f"The pool has no replica: {_fate(pool, lately)}.")
    elif not fleet.members:
        yield Costly("No replica is known yet: Envoy's fallback policy chooses.")
    elif not (lost or no_poller) and (
        pool.clock() - fleet.eligibility.staleness.heard_at > STALE_AFTER_S
    ):
        yield (
            f"Stale state: pollers reported no replica for more than {STALE_AFTER_S:.0f} s. Read "
            "their logs."
        )
    if fleet.peers.stale and not lost:
        yield "Stale state of other routers: only polls show their requests in flight."


def _lost(processes: Presence, consequence: str) -> Iterator[str]:
    if lost := processes.lost:
        kind = processes.kind.capitalize()
        yield (
            f"{kind if lost[1:] else kind[:-1]} {_listed(lost)} lost: killed, hung, or cut off "
            f"from Redis. {consequence} Restart it; if its /livez answers, check its connection to "
            "Redis."
        )


def _pollers(pool: ObservedPool) -> Iterator[str]:
    """Yield a warning for each source of replicas, such as a DNS name, that a poller cannot use."""
    for poller, problems in (pool.fleet.pollers or {}).items():
        for problem in problems:
            yield f"Poller {poller} finds no new replicas of {problem}."


def _external(pool: ObservedPool) -> Iterator[str]:
    if pool.external.value > _EXTERNAL:
        yield (
            "The replicas serve requests that no router sent: Envoy goes on without the router "
            "(extproc check --envoy-admin names the cause), or other clients use the replicas."
        )


def _excluded(pool: ObservedPool, view: FleetView) -> Iterator[str]:
    fleet, reasons = pool.fleet, defaultdict[tuple[str, str], dict[str, str]](dict)
    for each in view.excluded:
        state = fleet.eligibility.conditions[each.replica].state
        if not state.draining:
            reasons[each.why, _remedy(state)][each.replica] = each.name
    if len(view) and not any(state.healthy and not state.asleep for state in fleet.members):
        yield Costly(f"No replica is healthy: {_fate(pool, 'requests')}.")
    by_size = sorted(reasons.items(), key=lambda reason: -len(reason[1]))
    for (why, remedy), names in by_size[:_MOST_REASONS]:
        subject = _listed(sorted(names.values(), key=natural))
        if 1 < len(names) == len(view):
            subject = f"All {len(names)} replicas are"
        excluded = pool.exclusions.since(names)
        when = f" ({excluded})" if excluded else ""
        it, its = ("them", "their") if len(names) > 1 else ("it", "its")
        yield f"{subject} excluded: {why}{when}.{remedy.format(it=it, its=its)}"
    if rest := sum(len(names) for _, names in by_size[_MOST_REASONS:]):
        yield f"{rest} more replicas are excluded for other reasons."


def _fate(pool: ObservedPool, requests: str) -> str:
    """Return what happens to these requests, which no replica can serve."""
    hold = pool.config.hold
    longest_s = min(hold.empty_s, hold.longest_s) if pool.config.serve.steers_all else 0.0
    if not longest_s:
        return "Envoy's fallback policy chooses"
    return f"{requests} wait for at most {longest_s:g} s (hold.empty_s), then get 503"


def _remedy(state: ReplicaState) -> str:
    """Return what a person has to do so that excluded replicas are used again; empty: it depends
    on the reason. ``{it}`` and ``{its}`` are pronouns for one replica or several."""
    if not state.healthy and (state.refuses or state.unanswered_s > 0.0):
        return " Restart {it}."
    return " Wake {it} up: send POST /wake_up to {its} own address." if state.asleep else ""


def _not_followed(pool: ObservedPool) -> Iterator[str]:
    """Yield a warning for each reason, except a retry, why Envoy ignored recent decisions."""
    for reason, cause in _NOT_FOLLOWED.items():
        # Envoy's fallback policy takes the second choice by chance, too.
        by_chance = reason is NotFollowed.UNKNOWN_ADDRESS and _lately(pool, NotFollowed.FALLBACK)
        if _lately(pool, reason) and not by_chance:
            yield f"Envoy did not follow decisions in the last minute: {cause}."


def _lately(pool: ObservedPool, fault: str) -> bool:
    return pool.clock() - pool.envoy_faults.get(fault, -inf) <= _LATELY_S


def _frozen(pool: ObservedPool) -> Iterator[str]:
    conditions = pool.fleet.eligibility.conditions.items()
    frozen = {id_: each.state.name or id_ for id_, each in conditions if each.frozen}
    if frozen:
        yield (
            f"{_listed([*frozen.values()])} showing gauges that do not move "
            f"({pool.onsets.since(FROZEN, frozen)}): the router ignores them and goes "
            "by its own count, so requests do not suffer. Restart a replica whose gauges still do "
            "not move after its next requests."
        )


def _slow(pool: ObservedPool) -> Iterator[str]:
    """Yield warnings about replicas slower than others of their profile, and about profiles that do
    not fit."""
    speeds = defaultdict[str, list[tuple[ReplicaState, float]]](list)
    for state in pool.fleet.members:
        if (speed := state.speeds.get("decode")) is not None:
            speeds[profile_or_default(state.profile).name].append((state, speed))
    for profile, measured in speeds.items():
        usual = median_high(speed for _, speed in measured)
        if slow := [state for state, speed in measured if speed < _SLOW * usual]:
            yield (
                f"{_listed([state.name or state.id for state in slow])} much slower than other "
                f"replicas of profile {profile} "
                f"({pool.onsets.since('slow', [state.id for state in slow])}): check the "
                "GPU's clock, its power, and what else runs on it."
            )
        if not 1.0 / _WRONG_PROFILE < usual < _WRONG_PROFILE:
            word = "slower" if usual < 1.0 else "faster"
            yield (
                f"Replicas of profile {profile} are more than {_WRONG_PROFILE:g} times {word} than "
                "the profile says: choose another profile."
            )


def _drifts(pool: ObservedPool, view: FleetView) -> Iterator[str]:
    """Yield warnings about replicas whose actual ÷ predicted decode time is much longer or shorter
    than on other replicas."""
    if not len(view):
        return
    low, high = (np.quantile(view.stretch, 0.5, method=which) for which in ("lower", "higher"))
    for word, drifting in (
        ("longer", view.stretch > _DRIFT * max(low, 1.0)),
        ("shorter", view.stretch < min(high, 1.0) / _DRIFT),
    ):
        if places := drifting.nonzero()[0].tolist():
            began = pool.onsets.since(word, [view.ids[place] for place in places])
            yield (
                f"{_listed([view.names[place] for place in places])} drifting from the prediction "
                f"({began}): decoding takes much {word} than the measured speed predicts."
            )


def _cold_caches(view: FleetView, ended: Sequence[PredictionResult]) -> Iterator[str]:
    sums = {replica: [0.0, 0.0] for replica in view.ids}  # tokens expected, and found
    for result in ended:
        if result.cached is not None and (tokens := sums.get(result.replica)):
            tokens[0] += result.expected_cached
            tokens[1] += result.cached
    cold = [
        name
        for name, (expected, found) in zip(view.names, sums.values(), strict=True)
        if expected >= _ENOUGH_TOKENS and found < _FOUND * expected
    ]
    if cold:
        yield (
            f"{_listed(cold)} finding less than half of the expected tokens in the prefix cache: "
            "check that the cache is on and large enough."
        )


def _full_queue(pool: ObservedPool) -> Iterator[str]:
    hold = pool.config.hold
    if len(pool.queue) >= _NEARLY * hold.most:
        yield Costly(
            f"The queue is nearly full: beyond {hold.most} requests (hold.most) the rest get 429."
        )
    oldest = next(iter(pool.queue), None)
    if oldest is not None and pool.clock() - oldest.since > hold.longest_s / 2:
        yield Costly(
            f"Requests have waited at this router for more than half of {hold.longest_s:g} s "
            "(hold.longest_s), after which it refuses them: add replicas."
        )


def _listed(names: Sequence[str]) -> str:
    """Join names: ``a is``; ``a and b are``; ``a, b, c and 9 more are``."""
    shown = [*names[:_MOST_NAMES]]
    if more := len(names) - len(shown):
        shown.append(f"{more} more")
    *first, last = shown
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"

"""The router's Prometheus metrics."""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import partial
from heapq import nlargest
from math import exp

from prometheus_client import CollectorRegistry, Gauge

from extproc.ground.clock import Clock
from extproc.observe.tally import OTHER, Counts, Spread
from extproc.predict.completion import work
from extproc.route.router import Decision
from extproc.route.waiting import Waiting

_TENANTS = 5  # those with the most; there may be as many as users, and each is a series
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
_DEMAND_FADES_S = 60.0
"""Work that arrived loses two thirds of its weight in this time; work that waits should be done in
it."""
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)


class Predicted:
    """A duration of requests, and predicted ÷ actual duration, by model and objective."""

    def __init__(
        self, name: str, what: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        by = "model", "objective"
        self._seconds = Spread(f"extproc_{name}_seconds", f"{what}.", bounds, registry, by)
        text = f"{what}: predicted ÷ actual, where the replica chosen served."
        self._ratio = Spread(f"extproc_{name}_predicted_ratio", text, _RATIOS, registry, by)

    def observe(self, actual: float, predicted: float | None, model: str, objective: str) -> None:
        """Count seconds; ``predicted`` is None where another replica served the request."""
        self._seconds.observe(actual, model, objective)
        if predicted is not None and actual > 0.0:
            self._ratio.observe(predicted / actual, model, objective)


class RouterMetrics:
    """The metrics of a router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counts = partial(Counts, registry=registry)
        spread = partial(Spread, registry=registry)
        gauge = partial(Gauge, registry=registry)
        predicted = partial(Predicted, registry=registry)
        self.requests = counts(
            "extproc_requests_total",
            "Requests by what became of them: routed, refused (400, 404, 429, 503), passed (no "
            "inference; where the body comes first, what has none is not asked about), unrouted "
            "(no healthy replica known: Envoy's fallback served), gave_up (the client hung up, or "
            "Envoy went on, while the request waited at the router), overload (more than "
            "serve.max_streams in flight: Envoy goes on without the router); and of those routed, "
            "unanswered (no response was seen that should have been: the client hung up, or Envoy "
            "no longer waited for the router, which ext_proc.message_timeouts counts in Envoy), "
            "lost (its replica hung, and it was ended).",
            ["result"],
        )
        self.refused = counts(
            "extproc_refused_total",
            "Refused requests by the reason that their answer gives: its code, or its type where "
            "it has none.",
            ["reason"],
        )
        self.decisions = counts(
            "extproc_decisions_total",
            "Decisions by policy and replica chosen.",
            ["policy", "replica"],
        )
        self.failures = counts(
            "extproc_failures_total",
            "Requests that a replica answered with 500 to 599, or that Envoy sent to another after "
            "it: what it is left out for.",
            ["replica"],
        )
        self.left_out = gauge(
            "extproc_replica_left_out",
            "1 for each replica that gets no requests, whatever their model, and the first reason: "
            "unhealthy, stalled (silent, too), failing, draining.",
            ["replica", "reason"],
        )
        self.hits_expected = counts(
            "extproc_prefix_cache_expected_tokens_total",
            "Prompt tokens that a replica should have had in its prefix cache, of the requests "
            "whose answer told how many it had.",
            ["replica"],
        )
        self.hits_reported = counts(
            "extproc_prefix_cache_reported_tokens_total",
            "Prompt tokens that it had there, by the same answers.",
            ["replica"],
        )
        self.decision_seconds = spread(
            "extproc_decision_seconds",
            "Time to inspect a request and choose its replica, where it did not have to wait.",
            (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2),
        )
        self.responses = counts(
            "extproc_responses_total",
            "Responses that the router was told of, by status class: at more than a hundred a "
            "second of an Envoy, a hundred a second of it, shared by its routers.",
            ["status"],
        )
        self.ttft = predicted(
            "ttft", "Time from decision to first token, of streams that are read", _SECONDS
        )
        self.tpot = predicted(
            "tpot", "Time per token after the first, of the same streams", _PER_TOKEN
        )
        self.completion = predicted(
            "completion", "Time from decision to the end of the response", _SECONDS
        )
        self.prediction_error = spread(
            "extproc_prediction_error_ratio",
            "|predicted − actual| ÷ actual completion time, of the same requests.",
            (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5),
        )
        self.waiting = gauge(
            "extproc_requests_waiting",
            "Requests that wait at the router until a replica can carry them, by objective and "
            "tenant: of tenants those with the most, and all that are left as other.",
            ["objective", "tenant"],
        )
        self.share = gauge(
            "extproc_tenant_share",
            "Share of what replicas did, as of late, for requests that had waited at the router, "
            "0 to 1, by tenant: those with the most, and all that are left as other.",
            ["tenant"],
        )
        self.waited_seconds = spread(
            "extproc_waited_seconds",
            "Time for which requests waited at the router that had to and were sent then.",
            _SECONDS,
        )
        self.in_flight = gauge(
            "extproc_requests_in_flight", "Requests in the ledger: sent, and not ended yet."
        )
        self.replicas_needed = gauge(
            "extproc_replicas_needed",
            "Replicas that would be busy all the time with what came to this router in the last "
            "minute or so, in batches as full as memory and targets per token allow, and with what "
            "waits at the router, done within a minute. Add up over routers.",
            ["pool"],
        )
        self.replicas = gauge("extproc_replicas", "Replicas known, by health.", ["health"])
        self.state_age = gauge(
            "extproc_state_age_seconds",
            "Seconds since the last news of any replica, from pollers or Redis.",
        )
        self.known_blocks = gauge(
            "extproc_replicas_known_blocks",
            "Replicas of which the KV blocks are known by their own word; what others hold is "
            "estimated.",
        )
        self.other_routers = gauge(
            "extproc_other_routers", "Other routers of the pool that are heard of."
        )
        self.digest_age = spread(
            "extproc_digest_age_seconds",
            "Age of other routers' digests when they arrive: this machine's time less the sender's "
            "when it was sent. A difference between two machines' clocks is in it, and nothing is "
            "below zero; decisions do not depend on it.",
            (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2),
        )
        self.redis_seconds = spread(
            "extproc_redis_seconds",
            "Round trip to Redis of a digest: half a second apart at the most, 20 ms at the least.",
            (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
        )
        self._skipped = counts(
            "extproc_redis_skipped_total",
            "What the router could not read in Redis, by reason: garbage, or what a later version "
            "writes: messages (unknown_tag) and fields (unknown_field).",
            ["reason"],
        )
        self.open_streams = gauge("extproc_open_streams", "ext_proc streams open now.")

    def skipped(self, reason: str, number: int) -> None:
        """Counts what could not be read in Redis."""
        self._skipped.add(reason, by=number)

    def tell_left_out(self, reasons: Iterable[tuple[str, str]]) -> None:
        self.left_out.clear()
        for replica, reason in reasons:
            self.left_out.labels(replica, reason).set(1)

    def forget_all_but(self, replicas: Container[str]) -> None:
        """Drop the counts of replicas that left the pool."""
        for counts in (self.decisions, self.failures, self.hits_expected, self.hits_reported):
            counts.keep("replica", replicas)

    def tell_waiting(
        self, held: Sequence[tuple[str, str, int]], got: Sequence[tuple[str, float]]
    ) -> None:
        """Set waiting requests by objective and tenant, and the replica seconds a tenant got."""
        named = _most((tenant, count) for _, tenant, count in held)
        self.waiting.clear()
        self.waiting.labels("", "").set(0)
        for objective, tenant, count in held:
            self.waiting.labels(objective, tenant if tenant in named else OTHER).inc(count)
        named, total = _most(got), sum(seconds for _, seconds in got)
        self.share.clear()
        for tenant, seconds in got:
            self.share.labels(tenant if tenant in named else OTHER).inc(seconds / total)


def _most(pairs: Iterable[tuple[str, float]]) -> list[str]:
    totals: defaultdict[str, float] = defaultdict(float)
    for tenant, value in pairs:
        totals[tenant] += value
    return nlargest(_TENANTS, totals, key=totals.__getitem__)


class Demand:
    """Replicas needed for the recent requests of one pool, refused ones included."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = self._seconds = 0.0  # of a replica, and of time; older ones fade
        self._at = clock()

    def came(self, decision: Decision) -> None:
        """Count a request by its first decision."""
        view, first = decision.situation.view, decision.choice.first
        self._fade()
        self._work += work(decision.profile, decision.prediction, view, first)

    def replicas(self, waiting: Iterable[Waiting]) -> float:
        """Replicas kept busy by the work that arrives, and by doing what waits in a minute."""
        self._fade()
        came = self._work / max(self._seconds, 1.0)
        return came + sum(one.cost for one in waiting) / _DEMAND_FADES_S

    def _fade(self) -> None:
        now = self._clock()
        faded = exp((self._at - now) / _DEMAND_FADES_S)
        self._work *= faded
        self._seconds = _DEMAND_FADES_S - faded * (_DEMAND_FADES_S - self._seconds)
        self._at = now

"""Prometheus metrics of a router."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from math import exp

from prometheus_client import CollectorRegistry, Gauge

from extproc.ground.clock import Clock
from extproc.observe.tally import OTHER, Counts, Spread
from extproc.route.decision import Decision
from extproc.route.waiting import Waiting

_TENANTS = 5  # those with the most; there may be as many as users, and each is a series
_MODELS = 20  # those with the most
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
_DEMAND_FADES_S = 60.0  # work that arrived fades to 1/e; work that waits should be done by then
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)


class Predicted:
    """Duration of requests, and predicted ÷ actual duration, by model and objective."""

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
    """Metrics of a router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counts = partial(Counts, registry=registry)
        spread = partial(Spread, registry=registry)
        gauge = partial(Gauge, registry=registry)
        predicted = partial(Predicted, registry=registry)
        self.requests = counts(
            "extproc_requests_total",
            "Requests by result: routed, refused (400, 404, 429, 503), passed (no inference), "
            "unrouted (no healthy replica known: Envoy's fallback served), gave_up (while the "
            "request waited at the router, the client hung up, or Envoy went on), overload (more "
            "than serve.max_streams in flight: Envoy goes on without the router). Of those routed "
            "also unanswered (the client hung up, or Envoy stopped waiting for the router, which "
            "ext_proc.message_timeouts counts in Envoy), lost (its replica hung, and the router "
            "ended the request).",
            ["result"],
        )
        self.refused = counts(
            "extproc_refused_total",
            "Refused requests by the code of the error, or by its type where it has no code.",
            ["reason"],
        )
        self.decisions = counts(
            "extproc_decisions_total",
            "Decisions by policy and replica chosen.",
            ["policy", "replica"],
        )
        self.failures = counts(
            "extproc_failures_total",
            "Requests that a replica answered with 500 to 599, or that Envoy retried on another; "
            "several in a row eject the replica.",
            ["replica"],
        )
        self.left_out = gauge(
            "extproc_replica_left_out",
            "1 for each replica that gets no requests of any model, by the first reason: "
            "unhealthy, stalled (silent, too), failing, draining.",
            ["replica", "reason"],
        )
        self.hits_expected = counts(
            "extproc_prefix_cache_expected_tokens_total",
            "Prompt tokens expected in the prefix cache of a replica, of requests whose response "
            "reports how many it had.",
            ["replica"],
        )
        self.hits_reported = counts(
            "extproc_prefix_cache_reported_tokens_total",
            "Prompt tokens found in the prefix cache of a replica, by the same responses.",
            ["replica"],
        )
        self.decision_seconds = spread(
            "extproc_decision_seconds",
            "Time to inspect a request and choose its replica, where it did not have to wait.",
            (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2),
        )
        self.responses = counts(
            "extproc_responses_total",
            "Responses that the router saw, by status class: at more than a hundred a second of "
            "an Envoy, a hundred a second of it, shared by its routers.",
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
            "tenant: the tenants with the most, and the rest as other.",
            ["objective", "tenant"],
        )
        self.unserved = gauge(
            "extproc_requests_unserved",
            "Of the requests that wait at the router, those whose model no replica serves now, by "
            "model: the models with the most, and the rest as other.",
            ["pool", "model"],
        )
        self.share = gauge(
            "extproc_tenant_share",
            "Recent share of replica time, 0 to 1, of requests that had waited at the router, by "
            "tenant: the tenants with the most, and the rest as other.",
            ["tenant"],
        )
        self.waited_seconds = spread(
            "extproc_waited_seconds",
            "Time at the router of requests that had to wait and were sent then.",
            _SECONDS,
        )
        self.in_flight = gauge(
            "extproc_requests_in_flight", "Requests in the ledger: sent, and not ended yet."
        )
        self.replicas_needed = gauge(
            "extproc_replicas_needed",
            "Replicas that the traffic of about the last minute would keep busy, in batches as "
            "full as memory and targets per token allow, and those that would do within a minute "
            "what waits at the router; one for each model that waits and has none. Add up over "
            "routers.",
            ["pool"],
        )
        self.replicas = gauge("extproc_replicas", "Replicas known, by health.", ["health"])
        self.state_age = gauge(
            "extproc_state_age_seconds",
            "Seconds since the last update of any replica, from pollers or Redis.",
        )
        self.known_blocks = gauge(
            "extproc_replicas_known_blocks",
            "Replicas that report their KV blocks; those of other replicas are estimated.",
        )
        self.other_routers = gauge(
            "extproc_other_routers",
            "Other routers of the pool that this one hears, or heard when Redis went away.",
        )
        self.digest_age = spread(
            "extproc_digest_age_seconds",
            "Age of other routers' digests when they arrive, at least 0: this machine's clock less "
            "the sender's. A difference between the clocks is part of it; decisions do not depend "
            "on it.",
            (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2),
        )
        self.redis_seconds = spread(
            "extproc_redis_seconds",
            "Round trip to Redis of a digest, measured every 20 to 500 ms.",
            (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
        )
        self._skipped = counts(
            "extproc_redis_skipped_total",
            "Entries in Redis that the router could not read, by reason: garbage, or the messages "
            "(unknown_tag) and fields (unknown_field) of a later version.",
            ["reason"],
        )
        self.open_streams = gauge("extproc_open_streams", "ext_proc streams open now.")

    def skipped(self, reason: str, number: int) -> None:
        self._skipped.add(reason, by=number)

    def tell_left_out(self, reasons: Iterable[tuple[str, str]]) -> None:
        self.left_out.clear()
        for replica, reason in reasons:
            self.left_out.labels(replica, reason).set(1)

    def forget_all_but(self, replicas: Container[str]) -> None:
        for counts in (self.decisions, self.failures, self.hits_expected, self.hits_reported):
            counts.keep("replica", replicas)

    def tell_waiting(
        self, held: Sequence[tuple[str, str, int]], got: Sequence[tuple[str, float]]
    ) -> None:
        """Set waiting requests by objective and tenant, and the replica seconds a tenant got."""
        label = _labels(((tenant, count) for _, tenant, count in held), _TENANTS)
        self.waiting.clear()
        self.waiting.labels("", "").set(0)
        for objective, tenant, count in held:
            self.waiting.labels(objective, label[tenant]).inc(count)
        label, total = _labels(got, _TENANTS), sum(seconds for _, seconds in got)
        self.share.clear()
        for tenant, seconds in got:
            self.share.labels(label[tenant]).inc(seconds / total)

    def tell_unserved(self, pools: Mapping[str, Mapping[str, int]]) -> None:
        """Set the waiting requests that no replica serves, by pool and model."""
        self.unserved.clear()
        for pool, counts in pools.items():
            label = _labels(counts.items(), _MODELS)
            for model, count in counts.items():
                self.unserved.labels(pool, label[model]).inc(count)


def _labels(pairs: Iterable[tuple[str, float]], count: int) -> dict[str, str]:
    """Map the ``count`` names with the highest sums to themselves, and the rest to other."""
    totals: defaultdict[str, float] = defaultdict(float)
    for name, value in pairs:
        totals[name] += value
    most = nlargest(count, totals, key=totals.__getitem__)
    return dict.fromkeys(totals, OTHER) | dict(zip(most, most, strict=True))


class Demand:
    """Number of replicas that the recent requests of a pool need, refused ones included."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = self._seconds = 0.0  # of a replica, and of time; older ones fade
        self._at = clock()

    def came(self, decision: Decision) -> None:
        self._fade()
        self._work += decision.work_s

    def replicas(self, waiting: Iterable[Waiting], routers: int = 1) -> float:
        """Replicas kept busy by the work that arrives, and by doing what waits in a minute.

        ``routers``: share the replica that a model needs while it waits and has none.
        """
        waiting = tuple(waiting)
        unserved = {one.model for one in waiting if one.unserved_since is not None}
        self._fade()
        came = self._work / max(self._seconds, 1.0)
        waits = sum(one.cost for one in waiting) / _DEMAND_FADES_S
        return came + waits + len(unserved) / routers

    def _fade(self) -> None:
        now = self._clock()
        faded = exp((self._at - now) / _DEMAND_FADES_S)
        self._work *= faded
        self._seconds = _DEMAND_FADES_S - faded * (_DEMAND_FADES_S - self._seconds)
        self._at = now

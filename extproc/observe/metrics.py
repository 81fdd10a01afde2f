"""Prometheus metrics of a router."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from math import exp, inf
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from extproc import __version__
from extproc.ground.clock import Clock
from extproc.ground.version import commit
from extproc.predict.step import profile_or_default
from extproc.replica_state import ReplicaState
from extproc.route.decision import Decision
from extproc.route.waiting import Waiting

OTHER = "other"  # label of the series for all values without a series of their own
_TENANTS = 5  # shown by name: each tenant is a series, and each user may be a tenant
_MODELS = 20  # shown by name
_PAIRS = 20  # of model and objective, shown by name
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PER_TOKEN = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
_DEMAND_FADES_S = 60.0  # arrived work fades to 1/e in this time; the queue should clear in it, too
_MOMENT_S = 1.0  # requests that queue for less may only wait for a faster replica
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)

# No second series for each counter and histogram, with the time of its start.
disable_created_metrics()  # type: ignore[no-untyped-call]


class _CachedSeries(MetricWrapperBase):
    """Metric that caches its series: looking one up by ``labels`` takes longer than ``inc``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._series: dict[tuple[str, ...], Self] = {}

    def _of(self, labels: tuple[str, ...]) -> Self:
        return self._series.get(labels) or self._series.setdefault(labels, self.labels(*labels))

    def _drop(self, unwanted: Iterable[tuple[str, ...]]) -> None:
        for labels in unwanted:
            del self._series[labels]
            self.remove(*labels)


class Counts(_CachedSeries, Counter):
    """Counter with a series for each of its labels."""

    def add(self, *labels: str, by: float = 1) -> None:
        self._of(labels).inc(by)

    def items(self) -> list[tuple[tuple[str, ...], float]]:
        (family,) = self.collect()
        return [(tuple(sample.labels.values()), sample.value) for sample in family.samples]

    def keep(self, replicas: Container[str]) -> None:
        """Remove the series of all other replicas; ``replica`` must be the last label."""
        self._drop([labels for labels in self._series if labels[-1] not in replicas])


class LabeledGauge(_CachedSeries, Gauge):
    """Gauge whose series are replaced as a whole. Series that stay are kept: to make the series of
    a thousand replicas anew would stop the router for 20 ms."""

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a series for each of these labels, and remove all others."""
        self._drop(self._series.keys() - values.keys())
        for labels, value in values.items():
            self._of(labels).set(value)


class PredictedSeconds:
    """Histograms of a duration and of predicted ÷ actual duration, by model and objective.

    The first 20 pairs of model and objective have series of their own, all later pairs share one:
    clients choose model names, and to write the series of 20 pairs stops the router for 10 ms.
    """

    def __init__(
        self, name: str, duration: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self.bounds = bounds
        histogram = partial(Histogram, labelnames=("model", "objective"), registry=registry)
        self._seconds = histogram(
            f"extproc_{name}_seconds", f"{duration.capitalize()}.", buckets=bounds
        )
        text = f"Predicted ÷ actual {duration}, if the chosen replica served the request."
        self._ratio = histogram(f"extproc_{name}_predicted_ratio", text, buckets=_RATIOS)
        self._children: dict[tuple[str, ...], tuple[Histogram, Histogram]] = {}

    def observe(self, actual: float, predicted: float | None, model: str, objective: str) -> None:
        """Count a duration in seconds. ``predicted``: None if a replica other than the chosen one
        served the request. An infinite prediction is not compared: the sum would stay infinite."""
        seconds, ratio = self._children.get((model, objective)) or self._enter(model, objective)
        seconds.observe(actual)
        if predicted is not None and predicted < inf and actual > 0.0:
            ratio.observe(predicted / actual)

    def _enter(self, *labels: str) -> tuple[Histogram, Histogram]:
        if len(self._children) >= _PAIRS:
            labels = OTHER, OTHER
        children = self._seconds.labels(*labels), self._ratio.labels(*labels)
        return self._children.setdefault(labels, children)

    def totals(self) -> list[float]:
        """Return the number of durations up to each bound, and in all, summed over all models."""
        (family,) = self._seconds.collect()
        counts = [sample.value for sample in family.samples if "le" in sample.labels]
        size = len(self.bounds) + 1
        return [sum(counts[at::size]) for at in range(size)]


def build_info(registry: CollectorRegistry) -> None:
    """Registers the version and the commit of this process."""
    text = "Version and commit of the process; the value is always 1."
    info = Gauge("extproc_build_info", text, ["version", "commit"], registry=registry)
    info.labels(__version__, commit()).set(1)


class RouterMetrics:
    """Metrics of a router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counts = partial(Counts, registry=registry)
        gauge = partial(Gauge, registry=registry)
        labeled = partial(LabeledGauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        predicted = partial(PredictedSeconds, registry=registry)
        self.requests = counts("extproc_requests_total", "Requests by result.", ["result"])
        self.refused = counts(
            "extproc_refused_total",
            "Refused requests by the code of the error, or by its type if the error has no code.",
            ["reason"],
        )
        self.decisions = counts(
            "extproc_decisions_total",
            "Decisions by policy and chosen replica.",
            ["policy", "replica"],
        )
        self.not_followed = counts(
            "extproc_not_followed_total",
            "Responses from a replica other than the chosen one, by reason: retry, "
            "unknown_address, other_filter or fallback.",
            ["reason"],
        )
        self.observed = counts(
            "extproc_observed_total",
            "Observed requests that were answered, by Envoy's choice: the replica that the router "
            "chose (same), another replica (other), or an address that the router does not know "
            "(unknown).",
            ["choice"],
        )
        self.observed_seconds = counts(
            "extproc_observed_completion_seconds_total",
            "Completion times of the observed requests whose end the router saw, added up: "
            "predicted for the router's choice, predicted for Envoy's choice, and actual.",
            ["time"],
        )
        self.failures = counts(
            "extproc_failures_total",
            "Requests that a replica answered with 500 to 599, or that Envoy retried on another "
            "replica, unless the second answered with 400 to 499.",
            ["replica"],
        )
        self.excluded = labeled(
            "extproc_replica_excluded",
            "1 for each replica that gets no requests of any model, by the first reason: unhealthy "
            "(stalled if the replica is silent), asleep, stalled, failing, full, not "
            "ready or draining.",
            ["replica", "reason"],
        )
        self.frozen = labeled(
            "extproc_replica_gauges_ignored",
            "1 for each replica whose gauges are ignored because they do not move.",
            ["replica"],
        )
        self.speed = labeled(
            "extproc_replica_speed_ratio",
            "Learned speed of a phase, decode or prefill, divided by the speed in the replica's "
            "hardware profile.",
            ["replica", "profile", "phase"],
        )
        self.hits_expected = counts(
            "extproc_prefix_cache_expected_tokens_total",
            "Prompt tokens expected in the prefix cache of a replica, of requests whose response "
            "reports cached tokens.",
            ["replica"],
        )
        self.hits_reported = counts(
            "extproc_prefix_cache_reported_tokens_total",
            "Prompt tokens found in the prefix cache of a replica, as responses report them.",
            ["replica"],
        )
        self.decision_seconds = histogram(
            "extproc_decision_seconds",
            "Time to read a request and choose its replica, of requests that did not wait.",
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2),
        )
        self.responses = counts(
            "extproc_responses_total", "Responses that the router saw, by status class.", ["status"]
        )
        self.ttft = predicted(
            "ttft", "time from decision to first token, of streams that the router reads", _SECONDS
        )
        self.tpot = predicted(
            "tpot", "time per token after the first, of streams that the router reads", _PER_TOKEN
        )
        self.completion = predicted(
            "completion", "time from decision to the end of the response", _SECONDS
        )
        self.prediction_error = histogram(
            "extproc_prediction_error_ratio",
            "|predicted − actual| ÷ actual completion time, of requests that the chosen replica "
            "served.",
            buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5),
        )
        self.waiting = labeled(
            "extproc_requests_queued",
            "Requests in the router's queue, by objective and tenant: the tenants with the most "
            "requests, and the rest as other.",
            ["objective", "tenant"],
        )
        self.unserved = labeled(
            "extproc_requests_unserved",
            "Requests in the router's queue whose model no replica serves now, by model: the "
            "models with the most requests, and the rest as other.",
            ["pool", "model"],
        )
        self.share = labeled(
            "extproc_tenant_share_ratio",
            "Recent share of replica time, 0 to 1, among requests that left the router's queue, "
            "by tenant: the tenants with the largest shares, and the rest as other.",
            ["tenant"],
        )
        self.queued_seconds = histogram(
            "extproc_queued_seconds",
            "Time in the router's queue, of requests that waited there and were dispatched.",
            buckets=_SECONDS,
        )
        self.in_flight = gauge(
            "extproc_requests_in_flight", "Requests in flight: dispatched, and not ended."
        )
        self.external_requests = gauge(
            "extproc_external_requests",
            "Requests that polls find on replicas and no router accounts for; 0 while another "
            "router's digests are late, and no value if the router only observes some requests.",
            ["pool"],
        )
        self.replicas_needed = gauge(
            "extproc_replicas_needed",
            "Replicas that this router's load needs, requests in its queue included.",
            ["pool"],
        )
        self.replicas = gauge(
            "extproc_replicas",
            "Known replicas by health: healthy, asleep (the engine sleeps), or unhealthy (the last "
            "scrape failed, or Kubernetes calls the pod not ready).",
            ["health"],
        )
        self.state_age = gauge(
            "extproc_state_age_seconds",
            "Seconds since the last update of any replica, from pollers or Redis; 0 if living "
            "pollers list no replica.",
        )
        self.known_blocks = gauge(
            "extproc_replicas_known_blocks",
            "Replicas that report their KV blocks; the router estimates the blocks of the others.",
        )
        self.other_routers = gauge(
            "extproc_other_routers",
            "Other routers of the pool whose digests arrive; while Redis is away, the last number.",
        )
        self.digest_age = histogram(
            "extproc_digest_age_seconds",
            "Age of other routers' digests at arrival, by this machine's clock and the sender's.",
            buckets=(1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2),
        )
        self.redis_seconds = histogram(
            "extproc_redis_seconds",
            "Round trip of a digest to Redis, measured every 20 to 500 ms.",
            buckets=(2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
        )
        self._skipped = counts(
            "extproc_redis_skipped_total",
            "Entries in Redis that the router skipped, by reason: garbage, or the messages "
            "(unknown_tag) and fields (unknown_field) of a later version.",
            ["reason"],
        )
        self.loop_delay = gauge(
            "extproc_loop_delay_seconds",
            "Delay with which the router's event loop runs timers that are due, at most 1 s, "
            "averaged with a time constant of 30 s.",
        )
        self.open_streams = gauge("extproc_open_streams", "Open ext_proc streams.")

    def skipped(self, reason: str, number: int) -> None:
        self._skipped.add(reason, by=number)

    def set_speeds(self, states: Iterable[ReplicaState]) -> None:
        self.speed.show(
            {
                (state.id, profile_or_default(state.profile).name, phase): speed
                for state in states
                for phase, speed in state.speeds.items()
            }
        )

    def drop_other_replicas(self, replicas: Container[str]) -> None:
        for counts in (self.decisions, self.failures, self.hits_expected, self.hits_reported):
            counts.keep(replicas)

    def set_waiting(
        self, waiting: Sequence[tuple[tuple[str, str], int]], used: Sequence[tuple[str, float]]
    ) -> None:
        """Set the gauges of queued requests, by objective and tenant, and of tenants' shares of
        replica time. ``used``: tenants with their replica-seconds."""
        self.waiting.show({("", ""): 0.0} | _most(_TENANTS, waiting))
        total = sum(seconds for _, seconds in used)
        self.share.show(_most(_TENANTS, [((tenant,), seconds / total) for tenant, seconds in used]))

    def set_unserved(self, pools: Mapping[str, Mapping[str, int]]) -> None:
        shown = dict[tuple[str, ...], float]()
        for pool, counts in pools.items():
            shown |= _most(_MODELS, [((pool, model), count) for model, count in counts.items()])
        self.unserved.show(shown)


def _most(
    count: int, values: Sequence[tuple[tuple[str, ...], float]]
) -> dict[tuple[str, ...], float]:
    """Sum values by their labels, of which the last is a name that clients choose. The ``count``
    names with the highest sums stay; all others become ``OTHER``."""
    totals = defaultdict[str, float](float)
    for (*_, name), value in values:
        totals[name] += value
    most = nlargest(count, totals, key=totals.__getitem__)
    sums = defaultdict[tuple[str, ...], float](float)
    for (*others, name), value in values:
        sums[*others, name if name in most else OTHER] += value
    return sums


class Demand:
    """Number of replicas that a pool's recent requests need, those included that the router
    refuses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = 0.0  # replica-seconds of arrived work, which fade
        self._began = self._at = clock()

    def arrived(self, decision: Decision) -> None:
        self._fade()
        self._work += decision.work_s

    def refused(self, work_s: float) -> None:
        """Take back the work of a request that arrived lately, because a replica refused it."""
        self._fade()
        self._work = max(self._work - work_s, 0.0)

    def replicas(self, waiting: Iterable[Waiting], routers: int = 1, usable: int = 0) -> float:
        """Return the number of replicas that arriving work keeps busy, plus the number that would
        clear the queue in a minute.

        If a request has waited for longer than ``_MOMENT_S``, all usable replicas count as busy.

        Args:
            waiting: requests in the queue.
            routers: number of routers, whose results are summed. So each counts an equal part of
                the usable replicas, and of one replica for each queued model without a replica.
            usable: replicas that are not excluded.
        """
        waiting = tuple(waiting)
        unserved = {request.model for request in waiting if request.unserved_since is not None}
        self._fade()
        seconds = _DEMAND_FADES_S * (1.0 - exp((self._began - self._at) / _DEMAND_FADES_S))
        arriving = self._work / max(seconds, 1.0)  # the seconds fade like the work
        long_ago = self._clock() - _MOMENT_S
        if any(request.unserved_since is None and request.since < long_ago for request in waiting):
            arriving = max(arriving, usable / routers)
        queued = sum(request.cost for request in waiting) / _DEMAND_FADES_S
        return arriving + queued + len(unserved) / routers

    def _fade(self) -> None:
        now = self._clock()
        self._work *= exp((self._at - now) / _DEMAND_FADES_S)
        self._at = now

"""Prometheus metrics of the poller."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class PollMetrics:
    """What the poller counts of itself; no label per replica, so that it stays small."""

    def __init__(self, registry: CollectorRegistry) -> None:
        scrapes = Counter(
            "extproc_poll_scrapes", "Scrapes of replicas.", ["result"], registry=registry
        )
        self.good = scrapes.labels("ok")
        self.late = scrapes.labels("late")
        self.failed = scrapes.labels("failed")
        self.seconds = Histogram(
            "extproc_poll_scrape_seconds",
            "Duration of a scrape that succeeded.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.replicas = Gauge(
            "extproc_poll_replicas", "Replicas scraped.", ["pool"], registry=registry
        )
        self.healthy = Gauge(
            "extproc_poll_replicas_healthy",
            "Replicas whose last scrape succeeded.",
            ["pool"],
            registry=registry,
        )

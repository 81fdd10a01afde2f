"""HTTP requests to one replica, bounded in time and memory."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from yarl import URL

from extproc.ground.runtime import started
from extproc.poll.metrics_text import (
    PageFigures,
    ScrapeError,
    drop_old_adapter_sets,
    read_metrics,
)

MAX_BYTES = 4 * 2**20
"""Largest accepted answer; ``/metrics`` of one or two engines has 60 kB without LoRA adapters."""
_LONG = 2**18  # bytes after which old sets of adapters are dropped from an answer

_SCRAPED = "/metrics", "/health"
_LONGEST_REASON = 200
_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class PollMetrics:
    """Prometheus metrics of a poller; no label names a replica, so that the page stays small."""

    def __init__(self, registry: CollectorRegistry) -> None:
        scrapes = Counter(
            "extproc_poll_scrapes", "Scrapes of replicas.", ["result"], registry=registry
        )
        self.good, self.late, self.failed = map(scrapes.labels, ("ok", "late", "failed"))
        self.seconds = Histogram(
            "extproc_poll_scrape_seconds",
            "Duration of a scrape that succeeded.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._skipped = Counter(
            "extproc_poll_redis_skipped",
            "Entries in Redis that the poller skipped, by reason: garbage, or the messages "
            "(unknown_tag) and fields (unknown_field) of a later version.",
            ["reason"],
            registry=registry,
        )
        gauge = partial(Gauge, labelnames=["pool"], registry=registry)
        self.lookups_failing = gauge(
            "extproc_poll_lookups_failing",
            "Host names, Kubernetes sources and files of replicas that cannot be read, so that the "
            "poller keeps their last replicas; Services and InferencePools that do not exist.",
        )
        self.redis_lost = gauge(
            "extproc_poll_redis_lost", "1 while the poller cannot write its states to Redis."
        )
        self.replicas = gauge(
            "extproc_poll_replicas",
            "Replicas that this poller scrapes; maybe none if several pollers share few replicas.",
        )
        self.healthy = gauge(
            "extproc_poll_replicas_healthy",
            "Replicas that this poller reports as healthy, and that neither sleep nor drain.",
        )

    def skipped(self, reason: str, number: int) -> None:
        self._skipped.labels(reason).inc(number)


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """Returns a session with persistent connections; the caller closes the session."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s / 2),
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        # Compression would take CPU time from the replica.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


async def scrape(session: aiohttp.ClientSession, replica: str, health: bool = True) -> PageFigures:
    """Requests ``/metrics`` of the replica at ``ip:port`` and, with ``health``, ``/health`` at the
    same time; raises ScrapeError if a request fails."""
    paths = _SCRAPED if health else _SCRAPED[:1]
    async with started(*(get(session, replica, path) for path in paths)) as requests:
        page, *_ = await asyncio.gather(*requests)
    return read_metrics(page)


async def responds(session: aiohttp.ClientSession, replica: str) -> bool:
    """Returns True if the replica at ``ip:port`` reacts in time: it begins an answer, even an
    error, or refuses the connection."""
    async with started(*(_responds(session, replica, path) for path in _SCRAPED)) as requests:
        for answered in asyncio.as_completed(requests):
            if await answered:
                return True
    return False


async def _responds(session: aiohttp.ClientSession, replica: str, path: str) -> bool:
    try:
        async with _answer(session, replica, path):
            return True
    except ScrapeError as error:
        return not error.silent


async def get(session: aiohttp.ClientSession, replica: str, path: str) -> bytes:
    """Returns the body of an answer with status 200; raises ScrapeError if no such answer comes."""
    body, long = bytearray(), _LONG
    async with _answer(session, replica, path) as response:
        while chunk := await response.content.readany():
            body += chunk
            if len(body) > long:
                drop_old_adapter_sets(body)
                if len(body) > MAX_BYTES:
                    raise ScrapeError(f"{path} is larger than {MAX_BYTES // 2**20} MiB")
                long = len(body) + _LONG
    return bytes(body)


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, replica: str, path: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    verb = "answer"
    try:
        async with session.get(_url(replica, path), allow_redirects=False) as response:
            verb = "end"
            if response.status != 200:
                raise ScrapeError(f"{path} answered {response.status}")
            yield response
    except aiohttp.ConnectionTimeoutError:
        raise ScrapeError("cannot connect: timed out", silent=True, connected=False) from None
    except TimeoutError:
        problem = f"{path} did not {verb} within {session.timeout.total:g} s"
        raise ScrapeError(problem, silent=True) from None
    except aiohttp.ClientConnectorError as error:
        problem = f"cannot connect: {_reason(error.os_error)}"
        refused = isinstance(error.os_error, ConnectionRefusedError)
        raise ScrapeError(problem, connected=False, refused=refused) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeError(f"{path} failed: {_reason(error)}") from None


@lru_cache(maxsize=10_000)  # parsing a URL takes a tenth of a scrape's time
def _url(replica: str, path: str) -> URL:
    return URL(f"http://{replica}{path}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__

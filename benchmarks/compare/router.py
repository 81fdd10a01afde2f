"""This project's router behind its Envoy, with Redis and a poller."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from benchmarks.attached import Attached
from benchmarks.compare.contenders import Front, Requests
from benchmarks.compare.envoy import envoy_stats, replica_trouble, says_who
from benchmarks.compare.fleets import Fleet, Servers
from benchmarks.discrete import poll_interval
from benchmarks.pages import decisions
from extproc.lab.harness.envoy_config import Bootstrap

_DECISIONS_KEPT = 25_000
_PARTS = {"picker": "router", "poller": "poller", "redis": "redis"}  # as the stack calls them


class Router:
    parts = tuple(_PARTS)

    def __init__(self, policy: str) -> None:
        self.name = f"router:{policy}"
        self.about = f"this router's policy {policy}, behind Envoy"
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator[Front]:
        """Runs the whole system anew: it knows of the replicas what its configuration says.

        That is a hardware profile of each, to start from, right or wrong: see ``Fleet.profiles``.
        """
        settings: dict[str, dict[str, object]] = {
            "route": {"policy": self._policy, "seed": seed},
            "poll": {"interval_s": poll_interval(self._policy)},
            "serve": {"decisions_kept": _DECISIONS_KEPT},
        }
        async with _Behind(directory, servers, fleet.profiles, settings) as stack:
            told = partial(decisions, stack.router_admin)
            parts = {part: stack.process(name) for part, name in _PARTS.items()}
            yield Front(stack.url, partial(self._complaints, stack), told, parts)

    async def _complaints(self, stack: Attached, requests: Requests) -> list[str]:
        found = await replica_trouble(stack.envoy_admin, len(stack.replicas))
        made = {one["request_id"]: one for one in await decisions(stack.router_admin)}
        stats, records = await envoy_stats(stack.envoy_admin), made.values()
        counts = {
            "were not asked about": sum(one["request_id"] not in made for one in requests),
            "were decided by another policy": sum(one["policy"] != self._policy for one in records),
            "were decided in a fallback": sum(bool(one["fallback"]) for one in records),
            "went on without the router's answer": stats.get(
                "http.openai.ext_proc.failure_mode_allowed", 0
            ),
            "went elsewhere than the router said": sum(
                one["outcome"]["served_by"] not in (None, one["replica"]) for one in records
            ),
        }
        return found + [f"{count} requests {what}" for what, count in counts.items() if count]


class _Behind(Attached):
    """With the same Envoy as the contenders that are Envoy alone."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        says_who(bootstrap)
        return bootstrap

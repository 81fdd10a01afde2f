"""This project's router behind its Envoy, with Redis and a poller."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attached import Attached
from benchmarks.compare.contenders import Prediction, Requests
from benchmarks.compare.envoy import envoy_stats, replica_trouble, says_who
from benchmarks.compare.fleets import Fleet, Servers
from benchmarks.pages import decisions
from benchmarks.polling import poll_interval
from extproc.demo.stack import Stack

_DECISIONS_KEPT = 25_000


class Router:
    """A policy of this router."""

    def __init__(self, policy: str) -> None:
        self.name = f"router:{policy}"
        self.about = f"this router's policy {policy}, behind Envoy"
        self._policy = policy

    @asynccontextmanager
    async def running(
        self, fleet: Fleet, servers: Servers, directory: Path, seed: int
    ) -> AsyncIterator["_Front"]:
        """Runs the whole system anew: it knows of the replicas what its configuration says.

        That is a hardware profile of each, to start from, right or wrong: see ``Fleet.profiles``.
        """
        settings: dict[str, dict[str, object]] = {
            "route": {"policy": self._policy, "seed": seed},
            "poll": {"interval_s": poll_interval(self._policy)},
            "serve": {"decisions_kept": _DECISIONS_KEPT},
        }
        async with _Behind(directory, servers, fleet.profiles, settings) as stack:
            yield _Front(stack.url, stack, self._policy)


class _Behind(Attached):
    """With the same Envoy as the contenders that are Envoy alone."""

    def _bootstrap(self) -> str:
        return says_who(super()._bootstrap())


@dataclass(frozen=True, slots=True)
class _Front:
    url: str
    stack: Stack
    policy: str

    async def complaints(self, requests: Requests) -> list[str]:
        found = await replica_trouble(self.stack.envoy_admin, len(self.stack.replicas))
        records = {one["request_id"]: one for one in await decisions(self.stack.router_admin)}
        stats = await envoy_stats(self.stack.envoy_admin)
        counts = {
            "were not asked about": sum(one["request_id"] not in records for one in requests),
            "were decided by another policy": sum(
                one["policy"] != self.policy for one in records.values()
            ),
            "were decided in a fallback": sum(bool(one["fallback"]) for one in records.values()),
            "went on without the router's answer": stats.get(
                "http.openai.ext_proc.failure_mode_allowed", 0
            ),
            "went elsewhere than the router said": sum(
                one["outcome"]["served_by"] not in (None, one["replica"])
                for one in records.values()
            ),
        }
        return found + [f"{count} requests {what}" for what, count in counts.items() if count]

    async def predictions(self) -> dict[str, Prediction]:
        return {
            one["request_id"]: Prediction(
                one["predicted_ttft_s"], one["predicted_completion_s"], one["replica"]
            )
            for one in await decisions(self.stack.router_admin)
        }

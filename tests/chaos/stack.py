"""The system of the scenes: every part that the table in docs/failure-modes.md names."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from redis.asyncio import Redis

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.processes import Check, flags
from extproc.lab.harness.stack import SimulatedReplica, Stack
from tests.chaos.poller import HOSTS
from tests.envoy.watched_files import bootstrap, split
from tests.kubernetes_api import ApiServer, endpoint, endpoint_slice

PROFILE = "llama-8b-h100"
REPLICAS = tuple(
    SimulatedReplica(f"r{number}", PROFILE, program=("tests.chaos.replica",))
    for number in range(1, 5)
)
NAMED, IN_SERVICE = "r3", "r4"
"""Replica that pollers find by DNS, and replica that pollers find as a pod of a Service."""
_LIVE = "live"  # folder of the files that Envoy reads again
_POLLER = "poller"  # user of Redis
_EMPTY_S = 3.0  # within the duration of a scene
_DRAIN_S = 5  # longer than any response takes


class ChaosStack(Stack):
    """A real Envoy with two routers, two pollers, a Redis and four simulated replicas.

    The pollers are a Redis user of their own, and find one replica by DNS and one by an API server
    of Kubernetes. Envoy reads its listener and clusters from files, so that a wrong configuration
    reaches it without a restart. Requests that no replica can serve wait for 3 s, not for a minute.
    """

    def __init__(self, directory: Path) -> None:
        settings = {"hold": {"empty_s": _EMPTY_S}}
        super().__init__(directory, REPLICAS, settings, routers=2, pollers=2)
        self.api = ApiServer(directory)

    async def __aenter__(self) -> Self:
        os.environ |= {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.api.port),
        }
        pod = endpoint("127.0.0.1", IN_SERVICE)
        self.api.put(endpoint_slice(pod, ports=[("http", self.ports[IN_SERVICE])]))
        self.resolve_names(True)
        await self.api.start()
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self.api.stop()

    async def start(self, name: str) -> None:
        """Start or restart a process; return when it answers."""
        await super().start(name)
        if name == "redis":
            await self.admit_pollers(True)

    async def redis_command(self, *words: object) -> None:
        """Send a command to Redis as its administrator."""
        redis: Any
        async with Redis.from_url(self.redis_url) as redis:
            await redis.execute_command(*words)

    async def admit_pollers(self, admitted: bool) -> None:
        """Let pollers use Redis, or cut them off."""
        user = ("ACL", "SETUSER", _POLLER)
        if admitted:
            await self.redis_command(*user, "on", "nopass", "~*", "&*", "+@all")
        else:
            await self.redis_command(*user, "off")
            await self.redis_command("CLIENT", "KILL", "USER", _POLLER)

    def resolve_names(self, resolve: bool) -> None:
        """Let names of replicas resolve, or let no name server answer."""
        hosts = self.directory / HOSTS
        hosts.touch() if resolve else hosts.unlink(missing_ok=True)

    def configure_envoy(self, whole: Bootstrap) -> None:
        """Give Envoy the listener and the clusters of a whole file."""
        split(whole, self.directory / _LIVE)

    def right_envoy(self) -> Bootstrap:
        """Return a copy of the configuration with which Envoy works."""
        return copy.deepcopy(self._right_envoy)

    def _write_configurations(self) -> None:
        super()._write_configurations()
        file = self.directory / "envoy.yaml"
        self._right_envoy = yaml.safe_load(file.read_text())
        self.configure_envoy(self._right_envoy)
        live = bootstrap(self._right_envoy, self.directory / _LIVE)
        file.write_text(yaml.safe_dump(live, sort_keys=False))

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        command, ready = super()._recipe(name)
        if name == "envoy":  # clients keep connections to a replaced listener for so long
            # Each connection ends after its next response, so that none is cut at the end.
            drain = {"drain-time-s": _DRAIN_S, "drain-strategy": "immediate"}
            return [*command, *flags(drain)], ready
        return command, ready

    def _configuration(self) -> dict[str, Any]:
        configuration = super()._configuration()
        sources = {source["name"]: source for source in configuration["replicas"]}
        sources[NAMED]["url"] = f"{NAMED}.test:{self.ports[NAMED]}"
        service = {"service": "vllm", "port": "http"}
        sources[IN_SERVICE] = {"kubernetes": service, "profile": PROFILE}
        return {**configuration, "replicas": [*sources.values()]}

    def _service(self, name: str) -> list[str]:
        argv = super()._service(name)
        if name not in self.pollers:
            return argv
        python, option, _extproc, *arguments = argv
        redis = self.redis_url.replace("//", f"//{_POLLER}:{_POLLER}@")
        program = [python, option, "tests.chaos.poller", str(self.directory)]
        return [*program, *arguments, "--redis.url", redis]

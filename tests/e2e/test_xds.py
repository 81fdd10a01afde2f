"""Envoy takes its replicas from ``extproc xds``, in a system all of whose parts are real."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.cli import main
from extproc.demo.processes import Check, Process, answers, free_port, listening
from extproc.demo.stack import MODEL, SimulatedReplica, Stack
from tests.e2e.client import Answer, Client, until
from tests.e2e.test_failures import more, traffic

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

ENVOY = Path(__file__).parents[2] / "envoy"
FLEET = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-h100"))
ANY = {"x-extproc-policy": "round_robin"}
SLOW_S = 30
"""An Envoy that lost its control plane asks for it again after some seconds."""


class XdsStack(Stack):
    """A stack whose Envoy runs envoy/xds.yaml."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, FLEET, {"serve": {"stream_sample": 1.0}})
        self.ports = {**self.ports, "xds": free_port(), "new": free_port()}

    async def start(self, name: str) -> None:
        if name == "envoy":
            await super().start("xds")
        await super().start(name)

    async def members(self, session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        """Envoy's replicas by address: health, and how many requests were sent there."""
        async with session.get(f"{self.envoy_admin}/clusters?format=json") as response:
            clusters = (await response.json(content_type=None))["cluster_statuses"]
        (hosts,) = (one.get("host_statuses", []) for one in clusters if one["name"] == "replicas")
        return {
            f"127.0.0.1:{host['address']['socket_address']['port_value']}": {
                "health": host["health_status"]["eds_health_status"],
                "requests": sum(
                    int(stat.get("value", 0))
                    for stat in host["stats"]
                    if stat["name"] == "rq_total"
                ),
            }
            for host in hosts
        }

    def _recipe(self, name: str) -> tuple[list[str | Path], Check]:
        if name == "xds":
            argv = self._command("xds", "--config", self.config_file)
            return [*argv], listening(self.ports["xds"])
        return super()._recipe(name)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "xds": {"listen": self.address("xds")}}

    def _write_configurations(self) -> None:
        super()._write_configurations()
        bootstrap = yaml.safe_load((ENVOY / "xds.yaml").read_text())
        resources = bootstrap["static_resources"]
        bootstrap["admin"]["address"] = self._socket("envoy-admin")
        resources["listeners"][0]["address"] = self._socket("envoy")
        for cluster in resources["clusters"]:
            if "load_assignment" in cluster:
                (locality,) = cluster["load_assignment"]["endpoints"]
                endpoint = {"address": self._socket(cluster["name"])}
                locality["lb_endpoints"] = [{"endpoint": endpoint}]
        (self.directory / "envoy.yaml").write_text(yaml.safe_dump(bootstrap))

    def _socket(self, name: str) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": self.ports[name]}}


class Envoy:
    """What a test asks of the stack and its Envoy."""

    def __init__(self, stack: XdsStack, client: Client, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.client = client
        self._session = session

    async def health(self) -> dict[str, str]:
        """By the replica's name."""
        members = await self.stack.members(self._session)
        return {self.name_of(address): one["health"] for address, one in members.items()}

    async def sent_to(self, name: str) -> int:
        """Requests that Envoy has sent to a replica."""
        members = await self.stack.members(self._session)
        return int(members[self.stack.address(name)]["requests"])

    def name_of(self, address: str) -> str:
        return next(name for name in self.stack.ports if self.stack.address(name) == address)

    async def has(self, seconds: float = 10, **health: str) -> None:
        """Returns when the replicas are these."""

        async def so() -> bool:
            return await self.health() == health

        await until(so, seconds)

    async def replicas(self, *arguments: str) -> None:
        """``extproc replicas``, which must succeed."""
        argv = ["replicas", *arguments, "--config", str(self.stack.config_file)]
        assert await asyncio.to_thread(main, argv) == 0

    def served_by(self, answer: Answer) -> str:
        return self.name_of(answer.decision["outcome"]["served_by"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def envoy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Envoy]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        XdsStack(tmp_path_factory.mktemp("xds")) as stack,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        running = Envoy(stack, Client(stack, session), session)
        await running.has(one="HEALTHY", two="HEALTHY")
        yield running


@asynccontextmanager
async def new_replica(stack: Stack) -> AsyncIterator[None]:
    """One that nothing in the configuration names."""
    port = stack.ports["new"]
    argv = [sys.executable, "-m", "extproc", "replica", "--port", str(port), "--model", MODEL]
    log = stack.directory / "new.log"
    ready = answers(f"http://127.0.0.1:{port}/health")
    async with await Process.start("new", argv, log=log, ready=ready):
        yield


async def test_a_replica_joins_takes_traffic_drains_and_leaves(envoy: Envoy) -> None:
    stack, client = envoy.stack, envoy.client
    async with new_replica(stack), traffic(client) as answers:
        await envoy.replicas("add", stack.address("new"), "--name", "new")
        await envoy.has(one="HEALTHY", two="HEALTHY", new="HEALTHY")
        served = await asyncio.gather(*(client.chat(tokens=3, headers=ANY) for _ in range(6)))
        assert "new" in {envoy.served_by(answer) for answer in served}

        await client.simulate("new", slow=20)  # what is there does not end by itself
        long = [asyncio.create_task(client.chat(tokens=500, headers=ANY)) for _ in range(3)]

        async def busy() -> bool:
            replicas = (await client.fleet())["replicas"]
            return any(one["running"] for one in replicas if one["name"] == "new")

        await until(busy)
        await envoy.replicas("drain", "new")
        await envoy.has(one="HEALTHY", two="HEALTHY", new="DRAINING")
        sent = await envoy.sent_to("new")
        await more(answers, 10)
        await stack.kill("router")  # now Envoy chooses
        await more(answers, 10)
        assert await envoy.sent_to("new") == sent
        await stack.start("router")
        await until(busy)
        await client.simulate("new", slow=0.1)
        ended = await asyncio.gather(*long)
        assert {answer.status for answer in ended} == {200}

        await envoy.replicas("remove", "new")
        await envoy.has(one="HEALTHY", two="HEALTHY")
        await more(answers, 5)
    assert {answer.status for answer in answers} == {200}


async def test_a_hung_replica_gets_nothing_while_the_router_is_down(envoy: Envoy) -> None:
    stack, client = envoy.stack, envoy.client
    await client.simulate("two", hang=True)
    await envoy.has(one="HEALTHY", two="UNHEALTHY")
    sent = await envoy.sent_to("two")
    await stack.kill("router")
    async with traffic(client) as answers:
        await more(answers, 20)
    assert {answer.status for answer in answers} == {200}
    assert await envoy.sent_to("two") == sent
    await client.simulate("two", hang=False)
    await envoy.has(one="HEALTHY", two="HEALTHY")
    await stack.start("router")
    await stack.wait_routing()


async def test_without_redis_nothing_changes(envoy: Envoy) -> None:
    stack = envoy.stack
    async with traffic(envoy.client) as answers:
        await more(answers, 5)
        await stack.kill("redis")
        await more(answers, 20)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await stack.start("redis")  # empty
        await stack.wait_routing()
        await more(answers, 10)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await envoy.replicas("drain", "two")
        await envoy.has(one="HEALTHY", two="DRAINING")
        await envoy.replicas("add", stack.address("two"))
        await envoy.has(one="HEALTHY", two="HEALTHY")
    assert {answer.status for answer in answers} == {200}


async def test_without_the_control_plane_envoy_goes_on_and_follows_it_again(envoy: Envoy) -> None:
    stack = envoy.stack
    async with traffic(envoy.client) as answers:
        await stack.kill("xds")
        await more(answers, 20)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await stack.start("xds")
        await envoy.replicas("drain", "two")
        await envoy.has(SLOW_S, one="HEALTHY", two="DRAINING")
        await envoy.replicas("add", stack.address("two"))
        await envoy.has(one="HEALTHY", two="HEALTHY")
    assert {answer.status for answer in answers} == {200}

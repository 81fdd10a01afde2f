"""Envoy takes its replicas from ``extproc eds``, in a system all of whose parts are real."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.processes import Process, answers, free_port
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import Answer, Client
from tests.e2e.stack import EdsStack, Stack, replicas
from tests.e2e.test_failures import more, traffic
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

FLEET = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-h100"))
ANY = {"x-extproc-policy": "round_robin"}


class Envoy:
    """What a test asks of the stack and its Envoy."""

    def __init__(self, stack: EdsStack, client: Client, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.client = client
        self._session = session

    async def members(self) -> dict[str, dict[str, Any]]:
        async with self._session.get(f"{self.stack.envoy_admin}/clusters?format=json") as response:
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

    async def health(self) -> dict[str, str]:
        members = await self.members()
        return {self.name_of(address): one["health"] for address, one in members.items()}

    async def sent_to(self, name: str) -> int:
        members = await self.members()
        return int(members[self.stack.address(name)]["requests"])

    async def connected(self, state: int) -> bool:
        url = f"{self.stack.envoy_admin}/stats?filter=replicas.*connected_state"
        async with self._session.get(url) as response:
            text = await response.text()
        return text.strip().endswith(f": {state}")

    def name_of(self, address: str) -> str:
        return next(name for name in self.stack.ports if self.stack.address(name) == address)

    async def has(self, **health: str) -> None:
        await until_read(self.health, lambda now: now == health)

    async def start_redis(self) -> None:
        seen = await self._scraped()
        await self.stack.start("redis")
        await until_read(
            self._scraped,
            lambda read: all(now > before for now, before in zip(read, seen, strict=True)),
        )

    async def _scraped(self) -> list[float]:
        replicas = (await self.client.fleet())["replicas"]
        return [one["scraped_at"] for one in sorted(replicas, key=lambda one: str(one["id"]))]

    async def replicas(self, *arguments: str) -> None:
        assert await replicas(self.stack, *arguments) == 0

    async def follows_drains(self) -> None:
        for command, health in (("drain", "DRAINING"), ("undrain", "HEALTHY")):
            await self.replicas(command, "two")
            await self.has(one="HEALTHY", two=health)

    def served_by(self, answer: Answer) -> str:
        return self.name_of(answer.decision["outcome"]["served_by"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def envoy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Envoy]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        EdsStack(tmp_path_factory.mktemp("eds"), FLEET) as stack,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        stack.ports["new"] = free_port()
        running = Envoy(stack, Client(stack, session), session)
        await running.has(one="HEALTHY", two="HEALTHY")
        yield running


@asynccontextmanager
async def new_replica(stack: Stack) -> AsyncIterator[None]:
    """One that nothing in the configuration names."""
    port = stack.ports["new"]
    argv = [sys.executable, "-m", "extproc", "simulate", "--port", str(port), "--model", MODEL]
    log = stack.directory / "new.log"
    ready = answers(f"http://127.0.0.1:{port}/health")
    async with await Process.start("new", argv, log=log, ready=ready):
        yield


async def test_a_replica_joins_takes_traffic_drains_and_leaves(envoy: Envoy) -> None:
    stack, client = envoy.stack, envoy.client

    async def known(how: str) -> bool:
        """Whether the router was told, too."""
        replicas = (await client.fleet())["replicas"]
        return any(one[how] for one in replicas if one["name"] == "new")

    async with new_replica(stack), traffic(client) as answers:
        usual = stack.listed()
        stack.list_replicas([*usual, {"url": stack.address("new"), "name": "new"}])
        await envoy.has(one="HEALTHY", two="HEALTHY", new="HEALTHY")
        await until(lambda: known("healthy"))
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
        await until(lambda: known("draining"))
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

        stack.list_replicas(usual)
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
        await envoy.start_redis()
        await more(answers, 10)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await envoy.follows_drains()
    assert {answer.status for answer in answers} == {200}


async def test_without_the_control_plane_envoy_goes_on_and_follows_it_again(envoy: Envoy) -> None:
    stack = envoy.stack
    async with traffic(envoy.client) as answers:
        await stack.kill("eds")
        await more(answers, 20)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await stack.start("eds")
        await envoy.follows_drains()
    assert {answer.status for answer in answers} == {200}


async def test_a_control_plane_that_knows_no_replica_yet_removes_none(envoy: Envoy) -> None:
    stack = envoy.stack
    async with traffic(envoy.client, per_second=5) as answers:
        await stack.kill("redis")
        await stack.kill("eds")
        await until(lambda: envoy.connected(0))
        await stack.start("eds")
        await until(lambda: envoy.connected(1))
        await more(answers, 5)
        assert await envoy.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await envoy.start_redis()
        await envoy.follows_drains()
    assert {answer.status for answer in answers} == {200}

"""Envoy follows a control plane: replicas join, drain and leave, and parts fail."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest_asyncio

from extproc.lab.harness.processes import Process, answers, free_port
from extproc.lab.harness.stack import MODEL
from tests.e2e.client import IN_TURN, EnvoyClient
from tests.e2e.stack import EdsStack, PatientStack, equal_pair, here, replicas
from tests.e2e.test_failures import more, traffic
from tests.envoy.members import EnvoyMembers
from tests.waiting import until, until_read


def system(directory: Path) -> PatientStack:
    stack = EdsStack(directory, here(equal_pair()))
    stack.ports["new"] = free_port()
    return stack


@pytest_asyncio.fixture(loop_scope="session")
async def members(stack: EdsStack) -> EnvoyMembers:
    names = {stack.address(name): name for name in stack.ports}
    members = EnvoyMembers(stack.envoy_admin, names)
    await members.have(one="HEALTHY", two="HEALTHY")
    return members


@asynccontextmanager
async def new_replica(stack: PatientStack) -> AsyncIterator[None]:
    """Start a replica that the configuration does not name."""
    port = stack.ports["new"]
    argv = [sys.executable, "-m", "extproc", "simulate", "--port", str(port), "--model", MODEL]
    log = stack.directory / "new.log"
    ready = answers(f"http://127.0.0.1:{port}/health")
    async with await Process.start("new", argv, log=log, ready=ready):
        yield


async def test_replica_joins_drains_and_leaves(
    client: EnvoyClient, stack: EdsStack, members: EnvoyMembers
) -> None:
    async def is_known(field: str) -> bool:
        """Return true if the router knows the new replica, and this field of it is true."""
        fleet = await client.replicas()
        return any(replica[field] for replica in fleet if replica["name"] == "new")

    async with new_replica(stack), traffic(client) as sent:
        listed = stack.listed()
        stack.list_replicas([*listed, {"url": stack.address("new"), "name": "new"}])
        await members.have(one="HEALTHY", two="HEALTHY", new="HEALTHY")
        await until(lambda: is_known("healthy"))
        turns = await asyncio.gather(*(client.chat(tokens=3, headers=IN_TURN) for _ in range(6)))
        assert stack.address("new") in {answer.decision["outcome"]["served_by"] for answer in turns}

        await client.simulate("new", slow=20)  # its requests do not end by themselves
        long = [asyncio.create_task(client.chat(500, headers=IN_TURN)) for _ in range(3)]
        await until(lambda: is_known("running"))
        assert await replicas(stack, "drain", "new") == 0
        await members.have(one="HEALTHY", two="HEALTHY", new="DRAINING")
        await until(lambda: is_known("draining"))
        before = await members.requests("new")
        await more(sent, 10)
        await stack.kill("router")  # now Envoy chooses
        await more(sent, 10)
        assert await members.requests("new") == before
        await stack.start("router")
        await until(lambda: is_known("running"))
        await client.simulate("new", slow=0.1)
        await asyncio.gather(*long)

        stack.list_replicas(listed)
        await members.have(one="HEALTHY", two="HEALTHY")
        await more(sent, 5)


async def test_hung_replica_gets_nothing_while_router_is_down(
    client: EnvoyClient, stack: EdsStack, members: EnvoyMembers
) -> None:
    async with client.simulating("two", hang=True):
        await members.have(one="HEALTHY", two="UNHEALTHY")
        before = await members.requests("two")
        await stack.kill("router")
        async with traffic(client) as sent:
            await more(sent, 20)
        assert await members.requests("two") == before
    await client.start_router()


async def connected(client: EnvoyClient, state: int) -> None:
    """Wait until Envoy's connection to the control plane is in this state: 0 or 1."""
    counter = "replicas.*connected_state"
    await until_read(lambda: client.envoy_counts(counter), lambda now: now == state)


async def test_control_plane_without_replicas_removes_no_member(
    client: EnvoyClient, stack: EdsStack, members: EnvoyMembers
) -> None:
    async with traffic(client, per_second=5) as sent:
        await stack.kill("redis")
        await stack.kill("eds")
        await connected(client, 0)
        starting = asyncio.create_task(stack.start("eds"))  # it listens once it knows a replica
        await more(sent, 5)
        assert await members.health() == {"one": "HEALTHY", "two": "HEALTHY"}
        await stack.start("redis")
        await starting
        await connected(client, 1)
        await until_read(lambda: replicas(stack, "drain", "two"), lambda status: status == 0)
        await members.have(one="HEALTHY", two="DRAINING")
        assert await replicas(stack, "undrain", "two") == 0
        await members.have(one="HEALTHY", two="HEALTHY")

"""Envoy follows a control plane: replicas join, drain and leave, and parts fail."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from extproc.lab.harness.processes import Process, answers, free_port
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import IN_TURN, EnvoyClient
from tests.e2e.stack import EdsStack, PatientStack, here, replicas
from tests.e2e.test_failures import more, traffic
from tests.envoy.members import EnvoyMembers
from tests.waiting import until

FLEET = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-h100"))


def system(directory: Path) -> PatientStack:
    stack = EdsStack(directory, here(FLEET))
    stack.ports["new"] = free_port()
    return stack


@asynccontextmanager
async def new_replica(stack: PatientStack) -> AsyncIterator[None]:
    """Start a replica that the configuration does not name."""
    port = stack.ports["new"]
    argv = [sys.executable, "-m", "extproc", "simulate", "--port", str(port), "--model", MODEL]
    log = stack.directory / "new.log"
    ready = answers(f"http://127.0.0.1:{port}/health")
    async with await Process.start("new", argv, log=log, ready=ready):
        yield


async def test_replica_joins_drains_and_leaves(client: EnvoyClient, stack: EdsStack) -> None:
    members = EnvoyMembers(stack.envoy_admin, {stack.address(name): name for name in stack.ports})

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

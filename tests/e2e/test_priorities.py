"""The priority of an objective, from the header that a client sends to the replica's own order."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.demo.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, Client
from tests.e2e.stack import Stack, on_ports
from tests.e2e.test_examples import EXAMPLES
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

OBJECTIVE = "x-gateway-inference-objective"
OBJECTIVES = {"urgent": {"priority": 10}, "batch": {"priority": -20}}
POLICIES = {"one": "priority", "two": "fcfs"}
ONE_BY_ONE = ("--max-num-seqs", "1")
REPLICAS = tuple(
    SimulatedReplica(name, "llama-8b-h100", (*ONE_BY_ONE, "--scheduling-policy", policy))
    for name, policy in POLICIES.items()
)
numbers = itertools.count()


class Behind(Stack):
    """The stack behind one of the files in envoy/, which tells the header; nothing waits at the
    router."""

    def __init__(self, name: str, directory: Path) -> None:
        hold = {"longest_s": 0, "objective_header": OBJECTIVE, "objectives": OBJECTIVES}
        serve = {"chunks_per_s": 1e6} | EXAMPLES.get(name, {})
        route = {"policy": "round_robin"}
        super().__init__(directory, REPLICAS, {"serve": serve, "hold": hold, "route": route})
        self.name = name

    def _bootstrap(self) -> str:
        whole = on_ports(self, self.name) if self.name != "envoy" else super()._bootstrap()
        told = rf"\g<0>\g<1>- request.headers['{OBJECTIVE}']\n"
        return re.sub(r"( *)- request\.path\n", told, whole)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["envoy", "cluster_header", "endpoint_picker"]
)
async def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    async with Behind(request.param, tmp_path_factory.mktemp("priorities")) as running:
        yield running


async def ask(client: Client, objective: str, tokens: int, **fields: object) -> str:
    """The id of a request that was answered."""
    name = f"{objective}-{next(numbers)}"
    message = {"role": "user", "content": name}
    headers = {"x-request-id": name, "x-simulate-output-tokens": str(tokens)}
    headers |= {OBJECTIVE: objective, "x-vllm-priority": "-1000"}
    async with client._session.post(
        client._stack.url + CHAT,
        json={"model": MODEL, "messages": [message], "max_tokens": tokens} | fields,
        headers=headers,
    ) as response:
        await response.read()
        assert response.status == 200
        return name


async def test_who_goes_by_priority_is_found_out_and_urgent_requests_go_first_there(
    client: Client,
) -> None:
    async def found() -> bool:
        replicas = (await client.fleet())["replicas"]
        return any(one["by_priority"] for one in replicas)

    await until(found)
    replicas = (await client.fleet())["replicas"]
    assert {one["name"]: one["by_priority"] for one in replicas} == {"one": True, "two": False}

    # Both are busy for long, and of those behind each is an order of its own.
    ended: list[str] = []

    async def noted(objective: str, **fields: object) -> None:
        ended.append(await ask(client, objective, 40, **fields))

    busy = [asyncio.create_task(ask(client, "batch", 400)) for _ in REPLICAS]

    async def running(requests: int) -> bool:
        return int((await client.fleet())["in_flight"]) == requests

    await until(lambda: running(2))
    lower = [asyncio.create_task(noted("batch", priority=-1000)) for _ in range(12)]
    await until(lambda: running(14))
    higher = [asyncio.create_task(noted("urgent", priority=1000)) for _ in range(4)]
    await asyncio.gather(*busy, *lower, *higher)
    served: dict[str, list[str]] = {name: [] for name in POLICIES}
    for name in ended:
        (record,) = await client.decisions(name)
        served[record["replica_name"]].append(name.partition("-")[0])
    batch, urgent = ["batch"] * 6, ["urgent"] * 2
    assert served == {"one": urgent + batch, "two": batch + urgent}, "whatever clients said"

"""The priority of an objective, from the header that a client sends to the replica's own order."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, Client
from tests.e2e.stack import Behind, ext_proc_of
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

OBJECTIVE = "x-gateway-inference-objective"
OBJECTIVES = {"urgent": {"priority": 10}, "batch": {"priority": -20}}
POLICIES = {"one": "priority", "two": "fcfs"}
ONE_BY_ONE = ("--max-num-seqs", "1")
REPLICAS = tuple(
    SimulatedReplica(name, "llama-8b-h100", (*ONE_BY_ONE, "--scheduling-policy", policy))
    for name, policy in POLICIES.items()
)
numbers = itertools.count()


class Case(Behind):
    """The stack behind one of the files in envoy/, which tells the header; nothing waits at the
    router."""

    def __init__(self, directory: Path) -> None:
        hold = {"longest_s": 0, "objective_header": OBJECTIVE, "objectives": OBJECTIVES}
        serve, route = {"chunks_per_s": 1e6}, {"policy": "round_robin"}
        super().__init__(directory, REPLICAS, {"serve": serve, "hold": hold, "route": route})

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "priority_scheduling": True}

    def _bootstrap(self) -> Bootstrap:
        whole = super()._bootstrap()
        if told := ext_proc_of(whole).get("request_attributes"):
            told.append(f"request.headers['{OBJECTIVE}']")
        return whole


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    async with Case(tmp_path_factory.mktemp("priorities")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(request: pytest.FixtureRequest, running: Case) -> Case:
    await running.behind(request.param)
    return running


async def ask(client: Client, objective: str, tokens: int, **fields: object) -> str:
    """The id of a request that was answered."""
    name = f"{objective}-{next(numbers)}"
    message = {"role": "user", "content": name}
    headers = {"x-request-id": name, "x-simulate-output-tokens": str(tokens)}
    headers |= {OBJECTIVE: objective, "x-vllm-priority": "-1000"}
    body = {"model": MODEL, "messages": [message], "max_tokens": tokens} | fields
    assert (await client.send("POST", CHAT, body, headers)).status == 200
    return name


async def told(client: Client, field: str) -> dict[str, bool]:
    """Of each replica what the router knows."""
    return {one["name"]: one[field] for one in (await client.fleet())["replicas"]}


@pytest.mark.parametrize("stack", ["envoy"], indirect=True)
async def test_priority_scheduling_of_the_pool_reaches_the_router(client: Client) -> None:
    await until_read(
        lambda: told(client, "by_priority"), lambda now: now == {"one": True, "two": True}
    )


@pytest.mark.parametrize("stack", ["envoy", "istio", "endpoint_picker"], indirect=True)
async def test_urgent_requests_go_first_where_priorities_count(client: Client) -> None:
    await until_read(lambda: told(client, "takes_priority"), lambda now: all(now.values()))
    # Both are busy all the while, and of those behind each is an order of its own.
    ended: list[str] = []

    async def noted(objective: str, **fields: object) -> None:
        ended.append(await ask(client, objective, 40, **fields))

    async def come(count: int, objective: str, **fields: object) -> None:
        tasks.extend(asyncio.create_task(noted(objective, **fields)) for _ in range(count))
        await until(lambda: at_replicas(client, len(tasks)))

    tasks: list[asyncio.Task[None]] = []
    await client.slow(100.0)
    await come(len(REPLICAS), "busy")
    await come(12, "batch", priority=-1000)
    await come(4, "urgent", priority=1000)
    await client.slow(1.0)
    await asyncio.gather(*tasks)
    served: dict[str, list[str]] = {name: [] for name in POLICIES}
    for name in ended:
        (record,) = await client.decisions(name)
        served[record["replica_name"]].append(name.partition("-")[0])
    batch, urgent = ["batch"] * 6, ["urgent"] * 2
    order = {"one": urgent + batch, "two": batch + urgent}
    assert served == {name: ["busy", *then] for name, then in order.items()}, (
        "whatever clients said"
    )


async def at_replicas(client: Client, count: int) -> bool:
    return sum([await client.load(one.name) for one in REPLICAS]) == count

import json

import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, MESSAGES, Client
from tests.e2e.stack import Stack
from tests.e2e.systems import LOST, OTHER, POOLS
from tests.e2e.test_membership import replicas
from tests.waiting import until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(pools: Stack) -> Stack:
    return pools


@pytest.mark.parametrize(("model", "replica"), [(MODEL, "llama"), (OTHER, "qwen")])
async def test_model_goes_where_it_is_served(client: Client, model: str, replica: str) -> None:
    await until_read(lambda: client.replica(replica), lambda now: model in now["models"])
    for _ in range(4):
        answer = await client.chat(model=model)
        assert answer.status == 200
        assert (answer.decision["pool"], answer.decision["replica_name"]) == ("default", replica)
        (left_out,) = answer.decision["excluded"]
        assert left_out["why"] == f"does not serve {model!r}"


async def test_a_route_says_which_pool_serves(client: Client) -> None:
    for _ in range(4):
        answer = await client.chat(headers={"host": "second.example"})
        assert answer.status == 200
        decision = answer.decision
        assert decision["pool"] == "second"
        assert decision["outcome"]["served_by"] == decision["replica"]
        assert {one["name"] for one in decision["candidates"]} == {"second-1", "second-2"}


async def test_a_prefix_that_the_route_takes_off_says_which_pool_serves(client: Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    answer = await client.request("POST", f"/batch{CHAT}", body)
    assert answer.status == 200
    decision = answer.decision
    assert (decision["pool"], decision["endpoint"]) == ("second", CHAT)
    assert decision["outcome"]["served_by"] == decision["replica"]


async def test_no_client_chooses_the_pool(client: Client) -> None:
    answer = await client.chat(headers={"x-extproc-pool": "second"})
    assert answer.decision["pool"] == "default"
    answer = await client.chat(headers={"host": "second.example", "x-extproc-pool": "default"})
    assert answer.decision["pool"] == "second"


async def test_unknown_pool_is_logged_once_and_served(client: Client, stack: Stack) -> None:
    for _ in range(3):
        answer = await client.chat(headers={"host": f"{LOST}.example"})
        assert (answer.status, answer.decisions) == (200, [])
    log = stack.process("router").log.read_text()
    (line,) = (line for line in log.splitlines() if "names a pool that is not configured" in line)
    assert LOST in line
    assert ", ".join(POOLS) in line


async def test_the_fleet_of_every_pool_is_shown(client: Client) -> None:
    await client.ledger_empty()
    shown = {one["name"]: one["pool"] for one in (await client.fleet())["replicas"]}
    assert shown == {one.name: pool for pool, fleet in POOLS.items() for one in fleet}


async def test_command_lists_one_pool(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert await replicas(stack, "list", "--pool", "second", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["second-1", "second-2"]
    assert await replicas(stack, "list", "--pool", "secnd") == 2
    assert "no pool is configured as 'secnd'; did you mean 'second'?" in capsys.readouterr().err

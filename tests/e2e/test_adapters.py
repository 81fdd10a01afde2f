"""LoRA adapters: a request goes where its adapter is, unless waiting there takes longer."""

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import Client
from tests.e2e.stack import Stack
from tests.e2e.systems import LOAD_S, POOLS
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]
HOST = "adapters.example"

ADAPTERS = ("law", "code")
ANOTHER = "tax"
REPLICAS = POOLS["adapters"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(pools: Stack) -> Stack:
    return pools


async def ask(client: Client, model: str, tokens: int = 8) -> dict[str, Any]:
    """The decision for a streamed request, known to be short: a replica that is measured a little
    faster makes up for no load."""
    return (await client.chat(tokens, model=model, stream=True, max_tokens=tokens)).decision


def terms(decision: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["terms_s"]["adapter"] for one in decision["candidates"]}


async def homes(client: Client) -> dict[str, str]:
    found: dict[str, str] = {}

    async def settled() -> bool:
        decisions = {name: await ask(client, name) for name in ADAPTERS}
        found.update({name: decision["replica_name"] for name, decision in decisions.items()})
        loads = [sorted(terms(decision).values()) for decision in decisions.values()]
        return all(here == 0.0 < there for here, there in loads) and len({*found.values()}) == 2

    await until(settled)
    return found


async def test_adapter_keeps_to_its_replica_and_load_elsewhere_is_known(client: Client) -> None:
    for _ in range(5):
        for name in (*ADAPTERS, ANOTHER):  # one more than two replicas keep loaded
            await ask(client, name)
    where = await homes(client)
    for _ in range(3):
        for name in ADAPTERS:
            decision = await ask(client, name)
            assert decision["replica_name"] == where[name]
            assert decision["outcome"]["status"] == 200
            (elsewhere,) = [s for one, s in terms(decision).items() if one != where[name]]
            assert elsewhere > 0.5 * LOAD_S, "it was 0.1 s before any was seen"
    plain = await ask(client, MODEL)
    assert set(terms(plain).values()) == {0.0}


async def test_request_whose_adapter_would_wait_goes_elsewhere(client: Client) -> None:
    await homes(client)
    long = client.chat(model="code", stream=True, max_tokens=20_000, ignore_eos=True)
    stream = asyncio.create_task(long)
    taken = await client.busy()  # where it was worth a load: one may be measured a little faster
    (free,) = {one.name for one in REPLICAS} - {taken}
    for decision in [await ask(client, "law") for _ in range(2)]:
        assert decision["replica_name"] == free
        assert terms(decision)[taken] > 2 * LOAD_S, "until the long answer has ended"
    assert terms(decision)[free] == 0.0, "the first one had it loaded at the latest"
    stream.cancel()
    await asyncio.wait([stream])
    await client.ledger_empty()

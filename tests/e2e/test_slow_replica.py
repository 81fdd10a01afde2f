"""In an overload of two fast replicas and a slow one, no request waits or is refused in vain, with
one router and with two."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from extproc.ground.clock import monotonic
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import SETTINGS, PatientStack, here

PLACES = 4  # in the batch of a replica
SMALL = ("--kv-tokens", "4000", "--max-num-seqs", f"{PLACES}")
SLOW = "slow"
REPLICAS = (
    SimulatedReplica("fast-1", "llama-8b-h100", SMALL),
    SimulatedReplica("fast-2", "llama-8b-h100", SMALL),
    SimulatedReplica(SLOW, "llama-8b-a10", SMALL),
)
REQUESTS, PER_SECOND = 250, 14.0  # about twice what the replicas can serve
TOKENS = 100  # of each answer, so that all take equally long on a replica
MARGIN = 1.25
"""Tolerance, because the replicas of a busy machine are slower than predicted. On an idle machine
the longest wait and service take 0.7 of the slow replica's time."""
SETTLES_S = 0.2  # in which a place that has come free is offered to the queue
MOST = 25  # requests queued at all routers


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[1, 2])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PatientStack]:
    routers = request.param
    settings = {**SETTINGS, "hold": {"longest_s": 6.0, "most": MOST // routers}}
    folder = tmp_path_factory.mktemp("stack")
    async with PatientStack(folder, here(REPLICAS), settings=settings, routers=routers) as stack:
        yield stack


@dataclass
class ServedRequest:
    """Times of a request, in seconds on the monotonic clock, and the replica that served it."""

    sent: float
    dispatched: float
    ended: float
    replica: str  # empty: the request was refused

    @property
    def served_s(self) -> float:
        return self.ended - self.dispatched


async def test_requests_wait_only_if_idle_slow_replica_serves_them_no_sooner(
    client: EnvoyClient, stack: PatientStack
) -> None:
    sending = []
    for number in range(REQUESTS):
        sending.append(asyncio.create_task(send(client, f"overload-{number}")))
        await asyncio.sleep(1.0 / PER_SECOND)
    requests = await asyncio.gather(*sending)
    on_slow = [request for request in requests if request.replica == SLOW]

    def had_place(at: float) -> bool:
        return sum(request.dispatched <= at < request.ended for request in on_slow) < PLACES

    refused = [request for request in requests if not request.replica]
    assert refused
    assert not [
        request
        for request in refused
        if had_place(request.ended) and had_place(request.ended - SETTLES_S)
    ]
    waited = [request for request in requests if request.dispatched > request.sent]
    assert len(waited) > REQUESTS / 2
    slow_s = max(request.served_s for request in on_slow)
    longest_s = max(request.ended - request.sent for request in waited if had_place(request.sent))
    assert longest_s <= MARGIN * slow_s


async def send(client: EnvoyClient, name: str) -> ServedRequest:
    body = {"model": MODEL, "prompt": name + " sea" * 300, "max_tokens": TOKENS}
    headers = {"x-request-id": name, "x-simulate-output-tokens": f"{TOKENS}"}
    answer = await client.send("POST", "/v1/completions", body, headers)
    ended = monotonic()
    if answer.status == 429:
        return ServedRequest(answer.sent, ended, ended, "")
    assert answer.status == 200, answer
    [record] = await client.decisions(name)
    queued_s = record["outcome"]["queued_s"]
    replica = client.stack.name_of(record["replica"])
    return ServedRequest(answer.sent, answer.sent + queued_s, ended, replica)

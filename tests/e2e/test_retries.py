"""Retries and hedges of Envoy: the ledger holds one entry, on the replica that serves."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import aiohttp
import pytest

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from tests.e2e.client import EnvoyClient, RoutedAnswer
from tests.e2e.stack import FAST_AND_SLOW, SETTINGS, PatientStack, here
from tests.waiting import until_read

PATIENCE_S = 0.4  # Envoy hedges a request that is not answered by then
OUTLASTING = 120  # tokens that take `one` longer, and `two` several times as long
TOLERATED = 3  # failures in a row before a replica is ejected


def hedge(bootstrap: Bootstrap) -> None:
    """Let Envoy retry every failure, and hedge when the first replica is slow."""
    (host,) = manager_of(bootstrap)["route_config"]["virtual_hosts"]
    route, *_ = host["routes"]  # all routes share this action
    route["route"]["retry_policy"] |= {
        "retry_on": "5xx,connect-failure,refused-stream,reset",
        "per_try_timeout": f"{PATIENCE_S}s",
    }
    route["route"]["hedge_policy"] = {"hedge_on_per_try_timeout": True}


system = partial(PatientStack, replicas=here(FAST_AND_SLOW, "one"), settings=SETTINGS, change=hedge)


async def finished(client: EnvoyClient) -> dict[str, float]:
    """Return the number of requests that each replica has served."""
    served = {}
    for replica in FAST_AND_SLOW:
        with suppress(aiohttp.ClientError, TimeoutError):
            served[replica.name] = await client.replica_counts(
                replica.name, "vllm:request_success_total"
            )
    return served


async def retries(client: EnvoyClient) -> int:
    return await client.envoy_counts("^cluster.replicas.upstream_rq_retry$")


async def counts_once(
    client: EnvoyClient, send: Callable[[], Awaitable[RoutedAnswer]]
) -> RoutedAnswer:
    """Send a request; assert that the ledger has one entry for it until the response ends.

    On a busy machine Envoy may hedge needlessly, so both replicas may serve the request.
    """
    counters = 'extproc_requests_total{result="routed"}', 'extproc_responses_total{status="2xx"}'
    before = [await client.metric(name) for name in counters]
    served = await finished(client)
    in_flight: set[int] = set()
    request = asyncio.ensure_future(send())
    while not request.done():
        in_flight.add(await client.in_flight())
        await asyncio.sleep(0.02)  # a second entry would stay for longer
    answer = await request
    assert in_flight <= {0, 1}
    await client.has_in_flight(0)
    assert [await client.metric(name) for name in counters] == [count + 1 for count in before]
    server = client.stack.name_of(answer.decision["outcome"]["served_by"])
    assert (await finished(client))[server] > served.get(server, 0)
    return answer


def way(client: EnvoyClient, answer: RoutedAnswer) -> tuple[str, str]:
    """Return the chosen replica and the serving replica."""
    served = client.stack.name_of(answer.decision["outcome"]["served_by"])
    return answer.decision["replica_name"], served


async def serves_again(client: EnvoyClient) -> None:
    chat = partial(client.chat, tokens=1, status=None)
    await until_read(chat, lambda now: way(client, now) == ("one", "one"))


@pytest.mark.parametrize("stream", [False, True])
async def test_hedge_won_by_first_replica_ejects_neither(client: EnvoyClient, stream: bool) -> None:
    before = await retries(client)
    for _ in range(TOLERATED + 1):
        answer = await counts_once(client, lambda: client.chat(tokens=OUTLASTING, stream=stream))
        assert way(client, answer) == ("one", "one")
    if not stream:  # the headers of a stream come with its first token
        assert await retries(client) >= before + TOLERATED
    assert (await client.chat(tokens=1)).decision["excluded"] == []


async def test_hedge_won_by_second_replica_is_booked_there(client: EnvoyClient) -> None:
    before = await retries(client)
    with client.stack.paused("poller"):  # or the router may know that the replica hangs
        async with client.simulating("one", hang=True):
            answer = await counts_once(client, lambda: client.chat(tokens=3))
    assert way(client, answer) == ("one", "two")
    assert await retries(client) > before
    await serves_again(client)


async def test_retried_request_moves_in_ledger_to_serving_replica(client: EnvoyClient) -> None:
    async def followed() -> RoutedAnswer:
        request = asyncio.create_task(client.chat(tokens=OUTLASTING, stream=True))
        await client.replica_is("two", lambda now: now["in_flight"] == 1)
        assert (await client.replica("one"))["in_flight"] == 0
        return await request

    async with client.simulating("one", fail=500):
        answer = await counts_once(client, followed)
    assert way(client, answer) == ("one", "two")
    assert answer.decision["outcome"]["not_followed"] == "retry"
    assert await client.metric('extproc_not_followed_total{reason="retry"}') > 0
    await serves_again(client)


async def test_request_on_dying_replica_is_retried(client: EnvoyClient) -> None:
    async def killed() -> RoutedAnswer:
        request = asyncio.create_task(client.chat(tokens=OUTLASTING))
        await client.replica_is("one", lambda now: now["in_flight"] == 1)
        await client.stack.kill("one")
        return await request

    with client.stack.paused("poller"):  # or the router may know that the replica is down
        await client.simulate("one", hang=True)  # or it may answer before it dies
        answer = await counts_once(client, killed)
    await client.stack.start("one")
    assert way(client, answer) == ("one", "two")
    await serves_again(client)

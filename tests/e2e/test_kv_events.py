"""Replicas publish KV cache events: the expected cached tokens equal the reported ones."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest_asyncio

from extproc.lab.harness.processes import free_port
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.lab.simulator import tokens
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import SETTINGS, PatientStack, here
from tests.waiting import until_read

KV_TOKENS = 4096


def publishing(name: str) -> SimulatedReplica:
    ports = free_port(), free_port()
    limits = ("--kv-tokens", str(KV_TOKENS), "--max-model-len", "2048", "--speed", "20")
    arguments = (*limits, "--enable-prompt-tokens-details")
    return SimulatedReplica(name, "llama-8b-h100", arguments, kv_events_ports=ports)


def system(directory: Path) -> PatientStack:
    replicas = [publishing("one"), publishing("two")]
    settings = {**SETTINGS, "poll": {"interval_s": 0.05}}
    return PatientStack(directory, here(replicas), settings)


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def blocks_are_known(client: EnvoyClient) -> None:
    await known(client)


async def known(client: EnvoyClient, known: bool = True) -> None:
    await until_read(
        client.replicas,
        lambda now: all((replica["known_blocks"] is not None) is known for replica in now),
    )


async def values(client: EnvoyClient, field: str) -> list[float]:
    return [replica[field] for replica in await client.replicas()]


async def settled(client: EnvoyClient, before: list[float]) -> None:
    """Wait until updates have come and no more follow within three polls."""
    updates = partial(values, client, "kv_update")
    now = await until_read(updates, lambda now: now != before)
    while now != before:
        before = now
        for _ in range(3):
            await polled(client)
        now = await updates()


async def polled(client: EnvoyClient) -> None:
    since = await values(client, "scraped_at")
    await until_read(
        partial(values, client, "scraped_at"),
        lambda read: all(now > then for now, then in zip(read, since, strict=True)),
    )


async def begin(client: EnvoyClient, ids: list[int]) -> tuple[Any, Any, list[int]]:
    """Complete a new prompt, and wait until the router knows its blocks."""
    before = await values(client, "kv_update")
    completed = await complete(client, ids)
    await settled(client, before)
    return completed


async def complete(client: EnvoyClient, ids: list[int]) -> tuple[Any, Any, list[int]]:
    """Return the expected and the reported cached tokens, and the prompt with its completion."""
    body = {"model": MODEL, "prompt": ids, "max_tokens": 24, "ignore_eos": True}
    got = await client.request("POST", "/v1/completions", body)
    reply = json.loads(got.body)
    said = tokens.token_ids(tokens.encode(reply["choices"][0]["text"]))
    reported = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return got.decision["expected_cached_tokens"], reported, [*ids, *said]


async def test_repeated_prompt_is_expected_in_cache(client: EnvoyClient) -> None:
    prompt = list(range(50_000, 50_333))
    first = await begin(client, prompt)
    assert first[:2] == (0, 0)
    assert (await complete(client, prompt))[:2] == (320, 320)
    longer = [*first[2], 7]  # with the completion, whose last token is not computed
    assert (await complete(client, longer))[:2] == (352, 352)


async def test_expectation_is_exact_in_cache_too_small(client: EnvoyClient) -> None:
    random = Random(3)
    talks = [[random.randrange(100_000) for _ in range(200 + 10 * k)] for k in range(40)]
    hits, pairs = 0, []
    for _ in range(40):
        which = min(int(random.expovariate(0.1)), len(talks) - 1)
        expected, reported, said = await begin(client, talks[which])
        pairs.append((expected, reported))
        hits += reported > 0
        talks[which] = [*said, *(random.randrange(100_000) for _ in range(30))]
        assert [expected for expected, _ in pairs] == [reported for _, reported in pairs]
    assert 5 < hits < 40, "some prompts are found, some are evicted"


async def test_expectation_survives_restarts_of_poller_redis_and_router(
    client: EnvoyClient,
) -> None:
    prompt = list(range(60_000, 60_100))
    await begin(client, prompt)
    for name in ("poller", "redis", "router"):
        await client.stack.kill(name)
        if name != "router":
            await known(client, False)
        await client.stack.start(name)
        await known(client)
        await until_read(
            lambda: client.metric("extproc_replicas_known_blocks"), lambda now: now == 2
        )
        assert (await complete(client, prompt))[:2] == (96, 96)
    for name in ("one", "two"):
        await client.stack.kill(name)
    await known(client, False)
    for name in ("one", "two"):
        await client.stack.start(name)
    await known(client)
    assert (await complete(client, prompt))[:2] == (0, 0)

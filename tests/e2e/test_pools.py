"""Pools behind one Envoy, which differ in models and caches."""

import asyncio
import json
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, endpoints, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, MESSAGES, EnvoyClient, RoutedAnswer
from tests.e2e.stack import PatientStack, cluster_of, here, of_pool, replicas
from tests.waiting import until_read

A10, H100 = "llama-8b-a10", "llama-8b-h100"
SETTINGS: dict[str, dict[str, object]] = {
    "hold": {"empty_s": 10},  # longer than the 5 s between two requests to an unhealthy replica
    "serve": {"chunks_per_s": 1e6},
    "poll": {"interval_s": 0.5},  # of eleven replicas
}
UNIT = 64  # tokens of a prompt that are cached together
OTHER = "qwen-7b"
_REPORTS_CACHED = "--enable-prompt-tokens-details"
_UNCACHED = "--no-enable-prefix-caching"
POOLS = {
    "default": (SimulatedReplica("llama", A10), SimulatedReplica("qwen", A10, ("--model", OTHER))),
    "second": (SimulatedReplica("second-1", A10), SimulatedReplica("second-2", A10)),
    "prefixes": (
        SimulatedReplica("cached-1", H100, (_REPORTS_CACHED,)),
        SimulatedReplica("cached-2", H100, (_REPORTS_CACHED,)),
        SimulatedReplica("cached-3", H100, (_REPORTS_CACHED,)),
        SimulatedReplica("off", H100, (_REPORTS_CACHED, _UNCACHED, "--model", "x")),
    ),
    "alone": (SimulatedReplica("alone", A10),),
    "narrow": (SimulatedReplica("narrow-1", H100), SimulatedReplica("narrow-2", H100)),
}
LOST = "lost"
"""A pool that a route names and the configuration lacks; its cluster is ``second``."""


class PoolsStack(PatientStack):
    """The pools above behind one Envoy.

    The host ``NAME.example`` leads to a pool, other hosts to the default pool, and paths below
    ``/batch/`` to ``second``. Envoy sends ``narrow`` one request at a time.
    """

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        by_name = {replica["name"]: replica for replica in whole["replicas"]}
        pools = {
            name: {"replicas": [by_name[replica.name] for replica in fleet]}
            for name, fleet in POOLS.items()
        }
        return {**whole, **pools.pop("default"), "pools": pools}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        clusters = bootstrap["static_resources"]["clusters"]
        default = cluster_of(bootstrap, "replicas")
        hosts = manager_of(bootstrap)["route_config"]["virtual_hosts"]
        for name, fleet in POOLS.items():
            members = endpoints([self.address(replica.name) for replica in fleet])
            if name == "default":
                default["load_assignment"]["endpoints"] = members
                continue
            clusters.append(deepcopy(default) | {"name": name})
            clusters[-1]["load_assignment"] |= {"endpoints": members}
            hosts.append(_host(hosts[0], name, name))
            if name == "narrow":
                clusters[-1]["circuit_breakers"]["thresholds"][0]["max_requests"] = 1
        hosts.append(_host(hosts[0], LOST, "second"))
        hosts[0]["routes"].insert(0, _by_prefix(hosts[1]))
        return bootstrap


def _host(pattern: dict[str, Any], pool: str, cluster: str) -> dict[str, Any]:
    host = deepcopy(pattern) | {"name": pool, "domains": [f"{pool}.example"]}
    for route in host["routes"]:
        route["route"]["cluster"] = cluster
    host["typed_per_filter_config"] = of_pool(pool)
    return host


def _by_prefix(host: dict[str, Any]) -> dict[str, Any]:
    """Return the route of docs/configuration.md: ext_proc sees the path before its rewrite."""
    route = host["routes"][-1]["route"] | {"prefix_rewrite": "/"}
    metadata = host["typed_per_filter_config"]
    return {"match": {"prefix": "/batch/"}, "route": route, "typed_per_filter_config": metadata}


FLEET = here(chain.from_iterable(POOLS.values()))
system = partial(PoolsStack, replicas=FLEET, settings=SETTINGS)


async def test_route_selects_pool(client: EnvoyClient) -> None:
    for _ in range(4):
        decision = (await client.chat(headers={"host": "second.example"})).decision
        assert decision["pool"] == "second"
        assert decision["outcome"]["served_by"] == decision["replica"]
        assert {candidate["name"] for candidate in decision["candidates"]} == {
            "second-1",
            "second-2",
        }


async def test_route_with_prefix_rewrite_selects_pool(client: EnvoyClient) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    decision = (await client.request("POST", f"/batch{CHAT}", body)).decision
    assert (decision["pool"], decision["endpoint"]) == ("second", CHAT)
    assert decision["outcome"]["served_by"] == decision["replica"]


async def test_client_cannot_choose_pool(client: EnvoyClient) -> None:
    answer = await client.chat(headers={"x-extproc-pool": "second"})
    assert answer.decision["pool"] == "default"
    answer = await client.chat(headers={"host": "second.example", "x-extproc-pool": "default"})
    assert answer.decision["pool"] == "second"


async def test_unknown_pool_is_logged_once_and_served(client: EnvoyClient) -> None:
    for _ in range(3):
        answer = await client.chat(headers={"host": f"{LOST}.example"})
        assert answer.decisions == []
    log = client.stack.process("router").log.read_text()
    (line,) = (line for line in log.splitlines() if "names a pool that is not configured" in line)
    assert LOST in line
    assert ", ".join(POOLS) in line


async def test_fleet_page_shows_every_pool(client: EnvoyClient) -> None:
    await client.has_in_flight(0)
    shown = {replica["name"]: replica["pool"] for replica in await client.replicas()}
    assert shown == {replica.name: pool for pool, fleet in POOLS.items() for replica in fleet}


async def test_command_lists_one_pool(
    stack: PatientStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await replicas(stack, "list", "--pool", "second", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [replica["name"] for replica in listed] == ["second-1", "second-2"]
    assert await replicas(stack, "list", "--pool", "secnd") == 2
    assert "no pool 'secnd' is configured; did you mean 'second'?" in capsys.readouterr().err


Messages = list[dict[str, str]]


def begun(topic: str, words: int = 3000) -> Messages:
    return [
        {"role": "system", "content": "You are a patient guide. " * 100},
        {"role": "user", "content": f"Tell me of the {topic}. " + f"{topic} " * words},
    ]


async def turn(
    client: EnvoyClient, messages: Messages, tokens: int = 40, model: str = MODEL
) -> tuple[RoutedAnswer, Messages]:
    """Return the next answer of a conversation, and the conversation with it.

    The bound is small, so that a faster replica never outweighs a cached prompt.
    """
    answer = await client.of("prefixes").chat(
        tokens, messages=messages, model=model, max_tokens=tokens
    )
    said = json.loads(answer.body)["choices"][0]["message"]["content"]
    following = {"role": "user", "content": "And then? " * 20}
    return answer, [*messages, {"role": "assistant", "content": said}, following]


def hits(answer: RoutedAnswer) -> tuple[float, int]:
    return answer.decision["expected_cached_tokens"], answer.decision["outcome"]["cached_tokens"]


async def test_conversation_stays_where_its_prompt_is_cached(client: EnvoyClient) -> None:
    for topic in ("sea", "sky", "hills"):
        messages, served = begun(topic), set()
        for number in range(4):
            answer, messages = await turn(client, messages)
            served.add(answer.decision["replica"])
            expected, reported = hits(answer)
            prompt = answer.decision["outcome"]["prompt_tokens"]
            assert expected == pytest.approx(reported, abs=0.05 * prompt)
            if number:
                assert reported > 0.9 * (prompt - 2 * UNIT)
                assert "cached" in answer.decision["why"]
        assert len(served) == 1


async def test_replica_without_prefix_cache_has_no_expected_hits(client: EnvoyClient) -> None:
    for number in range(2):
        answer, _ = await turn(client, begun("rain"), tokens=2, model="x")
        assert hits(answer) == (0, 0), number


async def test_full_circuit_breaker_excludes_no_replica(client: EnvoyClient) -> None:
    narrow = client.of("narrow")
    long = asyncio.create_task(narrow.chat(tokens=20_000))
    names = [replica.name for replica in POOLS["narrow"]]
    await until_read(lambda: client.load(*names), lambda now: now == 1)
    refused = [await narrow.chat(tokens=1, status=503) for _ in range(5)]
    assert all(answer.decision["excluded"] == [] for answer in refused)
    await client.slow(0.01)
    await long
    await client.slow(1.0)


async def serves_again(client: EnvoyClient) -> None:
    await until_read(lambda: client.chat(status=None), lambda now: now.status == 200)


async def test_model_whose_replicas_are_down_gets_503(client: EnvoyClient) -> None:
    assert (await client.chat()).decision["replica_name"] == "llama"
    await client.stack.kill("llama")
    await client.replica_is("llama", lambda now: not now["healthy"])
    # 404 would be the answer of another model's replica.
    for answer in await asyncio.gather(*(client.chat(status=503) for _ in range(4))):
        assert answer.headers["Retry-After"] == "1"
        assert json.loads(answer.body)["error"]["type"] == "service_unavailable_error"
        assert (await client.chat(model=OTHER)).decision["replica_name"] == "qwen"
    await client.chat(model="nobody's", status=404)
    await client.stack.start("llama")
    await serves_again(client)
    assert (await client.chat(model=MODEL)).decision["replica_name"] == "llama"


async def test_request_waits_for_only_replica_to_return(client: EnvoyClient) -> None:
    alone = client.of("alone")
    await serves_again(alone)
    await client.stack.stop("alone")
    await client.replica_is("alone", lambda now: not now["healthy"])
    waits = asyncio.create_task(alone.chat())
    unserved = f'extproc_requests_unserved{{model="{MODEL}",pool="alone"}}'
    await until_read(lambda: client.metric(unserved), lambda now: now == 1.0)
    assert await client.metric('extproc_replicas_needed{pool="alone"}') >= 1.0
    await client.stack.start("alone")
    assert (await waits).decision["outcome"]["queued_s"] > 0.0

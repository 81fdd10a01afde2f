"""Several pools in one deployment: by model within one, and by what Envoy's routes say."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, MESSAGES, Client
from tests.e2e.stack import Stack
from tests.e2e.test_membership import replicas
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

A10 = "llama-8b-a10"
OTHER = "qwen-7b"
FLEET = (
    SimulatedReplica("llama", A10),
    SimulatedReplica("qwen", A10, ("--model", OTHER)),
    SimulatedReplica("second-1", A10),
    SimulatedReplica("second-2", A10),
)


class Pools(Stack):
    """Two replicas of different models in the pool that is the default, two in another, and a
    route to a pool that does not exist; the host says which, or the path's prefix."""

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        own, second = whole["replicas"][:2], whole["replicas"][2:]
        return {**whole, "replicas": own, "pools": {"second": {"replicas": second}}}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        resources = bootstrap["static_resources"]
        cluster = next(one for one in resources["clusters"] if one["name"] == "replicas")
        members = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        other = deepcopy(cluster) | {"name": "second"}
        other["load_assignment"] |= {"endpoints": [{"lb_endpoints": members[2:]}]}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": members[:2]}]
        resources["clusters"].append(other)
        hosts = manager_of(bootstrap)["route_config"]["virtual_hosts"]
        hosts += [_host(hosts[0], "second", "second"), _host(hosts[0], "lost", "second")]
        hosts[0]["routes"].insert(0, _by_prefix(hosts[1]))
        return bootstrap


def _host(pattern: dict[str, Any], pool: str, cluster: str) -> dict[str, Any]:
    host = deepcopy(pattern) | {"name": pool, "domains": [f"{pool}.example"]}
    for route in host["routes"]:
        route["route"]["cluster"] = cluster
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    metadata = [{"key": "x-extproc-pool", "value": pool}]
    overrides = {"@type": kind, "overrides": {"grpc_initial_metadata": metadata}}
    host["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": overrides}
    return host


def _by_prefix(host: dict[str, Any]) -> dict[str, Any]:
    """As docs/configuration.md has it: the filter sees the path before it is rewritten."""
    route = host["routes"][-1]["route"] | {"prefix_rewrite": "/"}
    metadata = host["typed_per_filter_config"]
    return {"match": {"prefix": "/batch/"}, "route": route, "typed_per_filter_config": metadata}


def system(directory: Path) -> Stack:
    return Pools(directory, FLEET)


@pytest.mark.parametrize(("model", "replica"), [(MODEL, "llama"), (OTHER, "qwen")])
async def test_each_model_goes_to_the_replicas_that_serve_it(
    client: Client, model: str, replica: str
) -> None:
    async def known() -> bool:
        return model in (await client.replica(replica))["models"]

    await until(known)
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


async def test_a_pool_that_does_not_exist_is_told_once_and_served(
    client: Client, stack: Stack
) -> None:
    for _ in range(3):
        answer = await client.chat(headers={"host": "lost.example"})
        assert (answer.status, answer.decisions) == (200, [])
    log = stack.process("router").log.read_text()
    (line,) = (line for line in log.splitlines() if "names a pool that is not configured" in line)
    assert "lost" in line
    assert "default, second" in line


async def test_the_fleet_of_every_pool_is_shown(client: Client) -> None:
    await client.ledger_empty()
    shown = {one["name"]: one["pool"] for one in (await client.fleet())["replicas"]}
    assert shown == {
        "llama": "default", "qwen": "default", "second-1": "second", "second-2": "second",
    }  # fmt: skip


async def test_the_command_is_about_one_pool(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await replicas(stack, "list", "--pool", "second", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["second-1", "second-2"]
    assert await replicas(stack, "list", "--pool", "secnd") == 2
    assert "no pool is configured as 'secnd'; did you mean 'second'?" in capsys.readouterr().err

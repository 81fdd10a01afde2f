"""Traffic cases of the conformance suite of the Gateway API Inference Extension.

The suite tests gateways in a cluster with an endpoint picker of its own, which picks the endpoint
in the header ``test-epp-endpoint-selection``. Here Envoy is the gateway, in full duplex, and turns
that header into a subset hint; the router is the picker. Cases about the status of resources
concern a gateway's controller and are left out: ``InferencePoolAccepted``,
``InferencePoolResolvedRefsCondition``, ``InferencePoolInvalidEPPService``,
``InferencePoolHTTPRoutePortValidation``, ``HTTPRouteInvalidInferencePoolRef`` and the like.
"""

import asyncio
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, endpoints, manager_of
from extproc.lab.harness.stack import SimulatedReplica
from extproc.lab.simulator import SERVED_BY_HEADER
from tests.e2e.client import HEALTHY_ROUTERS, EnvoyClient, RoutedAnswer
from tests.e2e.stack import PatientStack, bootstrap_of, cluster_of, here, of_pool
from tests.waiting import until_read

SELECTION = "test-epp-endpoint-selection"
A10 = "llama-8b-a10"
PRIMARY, SECONDARY = ("one", "two", "three"), ("four", "five")
FLEET = tuple(SimulatedReplica(name, A10) for name in (*PRIMARY, *SECONDARY))
WEIGHTED = "/weighted"


class GatewayStack(PatientStack):
    """Two pools; the second gets 30% of the requests below ``/weighted/``."""

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        own, second = whole["replicas"][:3], whole["replicas"][3:]
        return {**whole, "replicas": own, "pools": {"second": {"replicas": second}}}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = bootstrap_of(self, "endpoint_picker")
        resources = bootstrap["static_resources"]
        manager = manager_of(bootstrap)
        manager["http_filters"].insert(0, _subset_hint())
        cluster = cluster_of(bootstrap, "replicas")
        second = deepcopy(cluster) | {"name": "second"}
        for pool_cluster, names in ((cluster, PRIMARY), (second, SECONDARY)):
            pool_cluster["load_assignment"]["endpoints"] = endpoints(map(self.address, names))
        resources["clusters"].append(second)
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        manager["route_config"]["virtual_hosts"][0]["routes"].insert(0, _weighted(route))
        return bootstrap


def _subset_hint() -> dict[str, Any]:
    hint = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "key": "x-gateway-destination-endpoint-subset",
    }
    rule = {"header": SELECTION, "on_header_present": hint, "remove": True}
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {"@type": kind, "request_rules": [rule]},
    }


def _weighted(route: dict[str, Any]) -> dict[str, Any]:
    second = {"name": "second", "weight": 30, "typed_per_filter_config": of_pool("second")}
    weighted = {"clusters": [{"name": "replicas", "weight": 70}, second]}
    action = {key: value for key, value in route["route"].items() if key != "cluster"}
    action |= {"weighted_clusters": weighted, "prefix_rewrite": "/"}
    return {"match": {"prefix": f"{WEIGHTED}/"}, "route": action}


system = partial(GatewayStack, replicas=here(FLEET), pollers=0)


async def selected(
    client: EnvoyClient,
    *names: str,
    path: str = "",
    requests: int = 40,
    status: int = 200,
) -> list[RoutedAnswer]:
    headers = {SELECTION: ",".join(map(client.stack.address, names))}
    limit = asyncio.Semaphore(10)

    async def send() -> RoutedAnswer:
        async with limit:
            body = {"model": "llama-8b", "prompt": "San Francisco", "max_tokens": 2}
            return await client.request("POST", f"{path}/v1/completions", body, headers, status)

    return await asyncio.gather(*(send() for _ in range(requests)))


def served_by(client: EnvoyClient, answers: list[RoutedAnswer]) -> set[str]:
    return {client.stack.name_of(answer.headers[SERVED_BY_HEADER]) for answer in answers}


@pytest.mark.parametrize("names", [PRIMARY[2:], PRIMARY[:2], PRIMARY])
async def test_gateway_following_epp_routing(client: EnvoyClient, names: tuple[str, ...]) -> None:
    """``GatewayFollowingEPPRouting`` and ``GatewayFollowingEPPRoutingWithDataParallelism``.

    All replicas are ports of one address, as in the second case.
    """
    assert served_by(client, await selected(client, *names)) <= set(names)


async def test_subset_without_endpoint_of_pool_gets_503(client: EnvoyClient) -> None:
    """The protocol demands it; the suite has no case."""
    await selected(client, *SECONDARY, requests=3, status=503)


async def test_gateway_destination_endpoint_served(client: EnvoyClient) -> None:
    """``GatewayDestinationEndpointServed``: the picker learns the serving endpoint."""
    for name in PRIMARY:
        (answer,) = await selected(client, name, requests=1)
        assert served_by(client, [answer]) == {name}
        assert answer.decision["outcome"]["served_by"] == client.stack.address(name)


async def test_gateway_weighted_across_two_inference_pools(client: EnvoyClient) -> None:
    """``GatewayWeightedAcrossTwoInferencePools``: each picker chooses endpoints of its pool.

    The request header lists the endpoints of both pools. Envoy chooses the pool at random.
    """
    answers = await selected(client, *PRIMARY, *SECONDARY, path=WEIGHTED, requests=60)
    by_pool = {"default": set(PRIMARY), "second": set(SECONDARY)}
    for pool, names in by_pool.items():
        of_pool = [answer for answer in answers if answer.decision["pool"] == pool]
        assert of_pool
        assert served_by(client, of_pool) <= names


async def test_epp_unavailable_fail_open(client: EnvoyClient) -> None:
    """``EppUnAvailableFailOpen``: without a picker any endpoint of the pool serves, eventually.

    In full duplex, requests fail until Envoy's health check finds that the picker is gone.
    """
    assert served_by(client, await selected(client, "one", requests=1)) == {"one"}
    async with client.without_router():
        await until_read(lambda: client.envoy_counts(HEALTHY_ROUTERS), lambda now: now == 0)
        assert served_by(client, await selected(client, "one", requests=10)) <= set(PRIMARY)

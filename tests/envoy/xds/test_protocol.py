"""The protocol, over a real gRPC channel."""

import grpc
import pytest
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.envoy.xds.catalog import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, Catalog
from extproc.envoy.xds.server import XdsServer
from tests.conftest import Logged
from tests.envoy.xds.conftest import ControlPlane, EnvoySide, serving

REFUSED = "envoy refused what it was sent"
NOT_SERVED = "envoy asks for what is not served"


def values(response: DiscoveryResponse) -> list[bytes]:
    assert {one.type_url for one in response.resources} <= {response.type_url}
    return [one.value for one in response.resources]


async def silent(stream: EnvoySide, plane: ControlPlane) -> None:
    """Nothing is sent: the next response is one that was only asked for now."""
    plane.catalog.replace(LISTENERS, {"probe": b"probe"})
    await stream.ask(LISTENERS)
    assert (await stream.response()).type_url == LISTENERS


async def test_what_is_asked_for_is_sent_and_sent_again_when_it_changes(
    plane: ControlPlane,
) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    first = await stream.response()
    assert (first.type_url, values(first)) == (ENDPOINTS, [b"a1"])
    await stream.ask(ENDPOINTS, "a", answering=first)
    plane.catalog.replace(ENDPOINTS, {"a": b"a2", "b": b"b1"})
    second = await stream.response()
    assert values(second) == [b"a2"]
    assert second.version_info != first.version_info
    assert second.nonce != first.nonce


async def test_what_was_taken_is_not_sent_again_nor_is_what_others_asked_for(
    plane: ControlPlane,
) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    await stream.ask(ENDPOINTS, "a", answering=await stream.response())
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b2"})
    await silent(stream, plane)


async def test_more_names_get_more(plane: ControlPlane) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    await stream.ask(ENDPOINTS, "a", "b", answering=await stream.response())
    assert values(await stream.response()) == [b"a1", b"b1"]


async def test_an_answer_to_an_older_response_says_nothing(plane: ControlPlane) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    first = await stream.response()
    plane.catalog.replace(ENDPOINTS, {"a": b"a2", "b": b"b1"})
    second = await stream.response()
    await stream.ask(ENDPOINTS, "b", answering=first)
    await stream.ask(ENDPOINTS, "a", answering=second)
    await silent(stream, plane)


async def test_a_refusal_is_logged_once_and_what_was_refused_is_not_sent_again(
    plane: ControlPlane, logged: Logged
) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    first = await stream.response()
    for _ in range(2):
        await stream.ask(ENDPOINTS, "a", answering=first, refusal="no such locality")
    line = await logged.line(REFUSED)
    assert (line["reason"], line["type"]) == ("no such locality", "ClusterLoadAssignment")
    assert line["node"] == "envoy-1"
    await silent(stream, plane)
    plane.catalog.replace(ENDPOINTS, {"a": b"a2"})
    assert values(await stream.response()) == [b"a2"]
    assert len(logged.lines(REFUSED)) == 1


async def test_what_is_not_known_yet_is_sent_when_it_is(
    plane: ControlPlane, logged: Logged
) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": None, "b": b"b1"})
    stream = plane.stream()
    await stream.ask(ENDPOINTS, "a")
    await silent(stream, plane)
    plane.catalog.replace(ENDPOINTS, {"a": b"a1", "b": b"b1"})
    assert values(await stream.response()) == [b"a1"]
    assert not logged.lines(NOT_SERVED)


async def test_all_clusters_come_where_none_is_named(plane: ControlPlane) -> None:
    plane.catalog.replace(CLUSTERS, {"one": b"1", "two": b"2"})
    stream = plane.stream()
    await stream.ask(CLUSTERS)
    first = await stream.response()
    assert values(first) == [b"1", b"2"]
    await stream.ask(CLUSTERS, answering=first)
    plane.catalog.replace(CLUSTERS, {"two": b"2"})
    assert values(await stream.response()) == [b"2"]


async def test_that_there_are_no_listeners_any_more_is_told(plane: ControlPlane) -> None:
    plane.catalog.replace(LISTENERS, {"one": b"1"})
    stream = plane.stream()
    await stream.ask(LISTENERS)
    await stream.ask(LISTENERS, answering=await stream.response())
    plane.catalog.replace(LISTENERS, {})
    emptied = await stream.response()
    assert (emptied.type_url, values(emptied)) == (LISTENERS, [])


async def renamed(plane: ControlPlane) -> EnvoySide:
    """A stream that has a cluster and its route; both are renamed, which it is about to hear."""
    plane.catalog.replace(CLUSTERS, {"old": b"old"})
    plane.catalog.replace(ROUTES, {"all": b"to old"})
    stream = plane.stream()
    for type_url, names in ((CLUSTERS, ()), (ROUTES, ("all",))):
        await stream.ask(type_url, *names)
        await stream.ask(type_url, *names, answering=await stream.response())
    plane.catalog.replace(CLUSTERS, {"new": b"new"})
    plane.catalog.replace(ROUTES, {"all": b"to new"})
    return stream


async def test_a_cluster_stays_until_the_route_to_it_is_gone(plane: ControlPlane) -> None:
    stream = await renamed(plane)
    both = await stream.response()
    assert (both.type_url, values(both)) == (CLUSTERS, [b"new", b"old"])
    await stream.ask(CLUSTERS, answering=both)  # not before has Envoy warmed the new one
    routes = await stream.response()
    assert (routes.type_url, values(routes)) == (ROUTES, [b"to new"])
    await stream.ask(ROUTES, "all", answering=routes)
    rest = await stream.response()
    assert (rest.type_url, values(rest)) == (CLUSTERS, [b"new"])


async def test_a_cluster_stays_while_envoy_refuses_the_routes_without_it(
    plane: ControlPlane,
) -> None:
    stream = await renamed(plane)
    await stream.ask(CLUSTERS, answering=await stream.response())
    await stream.ask(ROUTES, "all", answering=await stream.response(), refusal="no")
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    await stream.ask(ENDPOINTS, "a")
    assert (await stream.response()).type_url == ENDPOINTS
    plane.catalog.replace(ROUTES, {"all": b"to new, better"})
    await stream.ask(ROUTES, "all", answering=await stream.response())
    assert values(await stream.response()) == [b"new"]


async def test_a_route_waits_for_the_cluster_it_leads_to(plane: ControlPlane) -> None:
    stream = await renamed(plane)
    clusters = await stream.response()
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    await stream.ask(ENDPOINTS, "a")
    assert (await stream.response()).type_url == ENDPOINTS  # and no routes: it is still warming
    await stream.ask(CLUSTERS, answering=clusters)
    assert (await stream.response()).type_url == ROUTES


async def test_clusters_that_change_get_their_endpoints_again(plane: ControlPlane) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    plane.catalog.replace(CLUSTERS, {"one": b"1"})
    stream = plane.stream()
    await stream.ask(CLUSTERS)
    await stream.ask(CLUSTERS, answering=await stream.response())
    await stream.ask(ENDPOINTS, "a")
    await stream.ask(ENDPOINTS, "a", answering=await stream.response())
    plane.catalog.replace(CLUSTERS, {"one": b"2"})
    assert values(await stream.response()) == [b"2"]
    assert values(await stream.response()) == [b"a1"]


@pytest.mark.parametrize(
    ("type_url", "names", "asked"), [(ENDPOINTS, ["mine"], "mine"), (CLUSTERS, [], "all")]
)
async def test_who_asks_for_what_is_not_served_is_told_of(
    plane: ControlPlane, logged: Logged, type_url: str, names: list[str], asked: str
) -> None:
    plane.catalog.replace(ENDPOINTS, {"default": b"a1"})
    stream = plane.stream()
    await stream.ask(type_url, *names)
    line = await logged.line(NOT_SERVED)
    assert line["asked"] == asked
    assert ("default" if names else "xds.envoy_file") in str(line["served"])


async def test_a_version_is_the_same_from_every_server(plane: ControlPlane) -> None:
    async with serving(Catalog()) as other:
        versions = []
        for one in (plane, other):
            one.catalog.replace(ENDPOINTS, {"a": b"a1"})
            stream = one.stream()
            await stream.ask(ENDPOINTS, "a")
            versions.append((await stream.response()).version_info)
    assert versions[0] == versions[1]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("cluster.v3.Cluster", "StreamClusters"),
        ("endpoint.v3.Endpoint", "StreamEndpoints"),
        ("listener.v3.Listener", "StreamListeners"),
        ("route.v3.Route", "StreamRoutes"),
    ],
)
async def test_each_type_has_a_service_of_its_own(
    plane: ControlPlane, kind: str, method: str
) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    stream = plane.stream(f"envoy.service.{kind}DiscoveryService", method)
    await stream.ask(ENDPOINTS, "a")
    assert values(await stream.response()) == [b"a1"]


async def test_garbage_ends_its_stream_alone(plane: ControlPlane, logged: Logged) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    broken, good = plane.stream(), plane.stream()
    await broken.call.write(b"\x0a\xff\xff\xff")
    assert await broken.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(logged.lines("a client sent what is no DiscoveryRequest")) == 1
    await good.ask(ENDPOINTS, "a")
    assert values(await good.response()) == [b"a1"]


async def test_health_is_told(plane: ControlPlane) -> None:
    health = health_pb2_grpc.HealthStub(plane.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_streams_that_are_sent_away_end_and_new_ones_are_served(plane: ControlPlane) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    for _ in range(2):
        stream = plane.stream()
        await stream.ask(ENDPOINTS, "a")
        assert values(await stream.response()) == [b"a1"]
        plane.server.send_away()
        assert await stream.call.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_ends_leaves_nothing(plane: ControlPlane) -> None:
    plane.catalog.replace(ENDPOINTS, {"a": b"a1"})
    for _ in range(3):
        stream = plane.stream()
        await stream.ask(ENDPOINTS, "a")
        await stream.response()
        await stream.call.done_writing()
        assert await stream.call.code() == grpc.StatusCode.OK
    assert not plane.catalog._watchers


async def test_an_address_that_is_taken_is_named() -> None:
    first = XdsServer(Catalog())
    port = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} \(xds\.listen\)"):
        await XdsServer(Catalog()).start(f"127.0.0.1:{port}")
    await first.stop()

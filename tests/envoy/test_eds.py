"""EDS: the state of a stream, the server over a real gRPC channel, and the members of a pool."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from unittest.mock import Mock

import grpc
import pytest
from envoy_data_plane.envoy.config.core.v3 import HealthStatus, Node
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
from envoy_data_plane.google.rpc import Status
from grpc.aio import EOF
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import structs

from extproc.config import MutualTlsSettings
from extproc.envoy import eds_server
from extproc.envoy.eds import PoolMembers, load_assignment
from extproc.envoy.eds_server import ENDPOINTS, METHOD, SERVICE, EdsServer, Subscription
from extproc.replica_state import ReplicaState
from extproc.share.replicas import Put, Removed, Snapshot
from tests.conftest import Logged
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S

REFUSED = "envoy refused a list of replicas and keeps the old list"
UNKNOWN = "envoy asks for pools that are not configured: add them to 'pools'"


def request(*names: str, answering: DiscoveryResponse | None = None, refusal: str = "") -> bytes:
    """Return a request that subscribes, or that accepts or refuses the response it answers."""
    return bytes(
        DiscoveryRequest(
            type_url=ENDPOINTS,
            resource_names=list(names),
            node=Node(id="envoy-1", cluster="test"),
            response_nonce=answering.nonce if answering else "",
            version_info=answering.version_info if answering and not refusal else "",
            error_detail=Status(code=13, message=refusal) if refusal else None,
        )
    )


def encoded(assignment: bytes) -> Callable[[], bytes]:
    return lambda: assignment


def values(response: DiscoveryResponse | None) -> list[bytes]:
    assert response is not None
    assert response.type_url == ENDPOINTS
    assert {resource.type_url for resource in response.resources} == {ENDPOINTS}
    return [resource.value for resource in response.resources]


def ask(
    stream: Subscription, *names: str, answering: DiscoveryResponse | None = None, refusal: str = ""
) -> DiscoveryResponse | None:
    """Return the response to a request, if any."""
    raw = request(*names, answering=answering, refusal=refusal)
    stream.take(DiscoveryRequest.parse(raw))
    return stream.due()


def test_change_is_sent_once_to_subscribers() -> None:
    pools = {"a": encoded(b"a1"), "b": encoded(b"b1")}
    stream = Subscription(pools, "peer")
    first = ask(stream, "a")
    assert values(first) == [b"a1"]
    assert ask(stream, "a", answering=first) is None
    pools["b"] = encoded(b"b2")
    assert stream.due() is None
    pools["a"] = encoded(b"a2")
    second = stream.due()
    assert values(second) == [b"a2"]
    assert first is not None
    assert second is not None
    assert second.version_info != first.version_info
    assert second.nonce != first.nonce
    assert stream.due() is None


def test_additional_names_extend_response() -> None:
    stream = Subscription({"a": encoded(b"a1"), "b": encoded(b"b1")}, "peer")
    assert values(ask(stream, "a", "b", answering=ask(stream, "b"))) == [b"a1", b"b1"]


def test_acknowledgement_of_older_response_is_ignored() -> None:
    pools = {"a": encoded(b"a1"), "b": encoded(b"b1")}
    stream = Subscription(pools, "peer")
    first = ask(stream, "a")
    pools["a"] = encoded(b"a2")
    second = stream.due()
    assert ask(stream, "b", answering=first) is None
    assert ask(stream, "a", answering=second) is None


def test_refusal_is_logged_once_and_not_sent_again(logged: Logged) -> None:
    pools = {"a": encoded(b"a1")}
    stream = Subscription(pools, "peer")
    first = ask(stream, "a")
    assert ask(stream, "a", answering=first, refusal="no such locality") is None
    assert ask(stream, "a", answering=first) is None
    (line,) = logged.lines(REFUSED)
    assert (line["reason"], line["node"]) == ("no such locality", "envoy-1")
    pools["a"] = encoded(b"a2")
    assert values(stream.due()) == [b"a2"]


def test_pool_without_known_replica_is_sent_later(logged: Logged) -> None:
    pools: dict[str, Callable[[], bytes] | None] = {"a": None, "b": encoded(b"b1")}
    stream = Subscription(pools, "peer")
    assert ask(stream, "a") is None
    pools["a"] = encoded(b"a1")
    assert values(stream.due()) == [b"a1"]
    assert not logged.lines(UNKNOWN)


def test_unknown_pool_is_logged_with_known_pools(logged: Logged) -> None:
    stream = Subscription({"default": encoded(b"a1")}, "peer")
    assert ask(stream, "mine") is None
    (line,) = logged.lines(UNKNOWN)
    assert (line["requested"], line["served"], line["node"]) == ("mine", "default", "envoy-1")


def test_servers_give_equal_lists_equal_versions() -> None:
    answers = [ask(Subscription({"a": encoded(b"a1")}, "peer"), "a") for _ in range(2)]
    assert len({answer.version_info for answer in answers if answer is not None}) == 1


class RunningEds(NamedTuple):
    server: EdsServer
    channel: grpc.aio.Channel

    def stream(self) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
        return self.channel.stream_stream(f"/{SERVICE}/{METHOD}")()


async def response(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> DiscoveryResponse:
    async with asyncio.timeout(PATIENCE_S):
        raw = await call.read()
    assert raw is not EOF, "the stream ended"
    return DiscoveryResponse.parse(raw)


@pytest.fixture
async def eds() -> AsyncIterator[RunningEds]:
    server = EdsServer({"a": encoded(b"a1")}, MutualTlsSettings())
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield RunningEds(server, channel)
    await server.stop()


async def test_ended_stream_is_forgotten(eds: RunningEds) -> None:
    for number in range(3):
        call = eds.stream()
        await call.write(request("a"))
        await response(call)
        eds.server.put("a", encoded(b"a%d" % number))
        assert values(await response(call)) == [b"a%d" % number]
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    assert not eds.server.streams


async def test_first_list_does_not_wait_for_further_changes(
    eds: RunningEds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eds_server, "_SETTLE_S", 2 * PATIENCE_S)
    call = eds.stream()
    await call.write(request("a"))
    assert values(await response(call)) == [b"a1"]


async def test_successive_changes_are_encoded_once_and_sent_together(
    eds: RunningEds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eds_server, "_SETTLE_S", 0.2)
    calls = eds.stream(), eds.stream()
    for call in calls:
        await call.write(request("a"))
        await response(call)
    encode = Mock(return_value=b"a4")
    for _ in range(3):
        eds.server.put("a", encode)
        for _ in range(10):  # turns of the event loop, in which streams notice the change
            await asyncio.sleep(0)
    assert [values(await response(call)) for call in calls] == [[b"a4"]] * 2
    encode.assert_called_once_with()


async def test_garbage_ends_only_its_stream(eds: RunningEds, logged: Logged) -> None:
    broken, good = eds.stream(), eds.stream()
    await broken.write(b"\x0a\xff\xff\xff")
    assert await broken.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(logged.lines("stream closed: message is not a DiscoveryRequest")) == 1
    await good.write(request("a"))
    assert values(await response(good)) == [b"a1"]


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_service_reports_serving(eds: RunningEds, service: str) -> None:
    statuses = health_pb2.HealthCheckResponse
    health = health_pb2_grpc.HealthStub(eds.channel)
    for serves, status in ((True, statuses.SERVING), (False, statuses.NOT_SERVING)):
        await eds.server.report(serving=serves)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == status


async def test_closed_streams_may_be_opened_again(eds: RunningEds) -> None:
    for _ in range(2):
        call = eds.stream()
        await call.write(request("a"))
        assert values(await response(call)) == [b"a1"]
        eds.server.close_streams()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


A, B = ReplicaState(id="10.0.0.1:8000"), ReplicaState(id="[::1]:8000")
TTL_S = 10.0


@pytest.fixture
def members(clock: ManualClock) -> PoolMembers:
    return PoolMembers(clock)


def test_pool_is_unknown_before_first_replica(members: PoolMembers) -> None:
    assert not members.apply(Snapshot(()))
    assert members.apply(Snapshot((A,)))
    assert members.current == {A.id: HealthStatus.HEALTHY}


@pytest.mark.parametrize("why", [{"healthy": False}, {"ready": False}, {"asleep": True}])
def test_health_and_draining_follow_polls(members: PoolMembers, why: dict[str, bool]) -> None:
    members.apply(Snapshot((A, B)))
    assert not members.apply(Put(structs.replace(A, running=7)))
    assert members.apply(Put(structs.replace(A, **why)))
    assert members.apply(Put(structs.replace(B, draining=True)))
    assert members.current == {A.id: HealthStatus.UNHEALTHY, B.id: HealthStatus.DRAINING}
    assert members.apply(Put(A))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.DRAINING}


def test_removed_replica_leaves_even_as_last_member(members: PoolMembers) -> None:
    members.apply(Snapshot((A,)))
    assert members.apply(Removed(A.id))
    assert not members.apply(Removed(A.id))
    assert members.current == {}


def test_replica_missing_from_snapshot_stays(members: PoolMembers) -> None:
    members.apply(Snapshot((A, B)))
    assert not members.apply(Snapshot((A,)))
    assert not members.apply(Snapshot(()))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.HEALTHY}


def poll(
    members: PoolMembers, clock: ManualClock, seconds: int, *polled: ReplicaState
) -> list[str]:
    """Poll once a second; return the replicas that were dropped as stale."""
    dropped = []
    for _ in range(seconds):
        clock.advance(1)
        for state in polled:
            members.apply(Put(state))
        dropped += members.drop_stale(TTL_S)
    return dropped


def test_stale_replica_leaves_only_while_others_have_updates(
    members: PoolMembers, clock: ManualClock
) -> None:
    poll(members, clock, 20, A, B)
    assert poll(members, clock, 1000) == []
    # A restarted Redis is empty: a missing replica stays until its state is stale.
    assert poll(members, clock, 10, A) == []
    assert poll(members, clock, 1, A) == [B.id]
    assert members.current == {A.id: HealthStatus.HEALTHY}


def test_load_assignment_has_address_and_health() -> None:
    members = {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.DRAINING}
    read = ClusterLoadAssignment.parse(load_assignment("batch", members))
    assert read.cluster_name == "batch"
    (locality,) = read.endpoints
    assert [endpoint.to_dict() for endpoint in locality.lb_endpoints] == [
        {"endpoint": {"address": {"socketAddress": {"address": host, "portValue": 8000}}}, **health}
        for host, health in (
            ("10.0.0.1", {"healthStatus": "HEALTHY"}),
            ("::1", {"healthStatus": "DRAINING"}),
        )
    ]


def test_load_assignment_of_empty_pool_has_no_endpoints() -> None:
    read = ClusterLoadAssignment.parse(load_assignment("batch", {}))
    assert [locality.lb_endpoints for locality in read.endpoints] == [[]]

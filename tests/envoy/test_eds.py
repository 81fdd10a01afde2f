"""EDS: the protocol, by the state of a stream and over a real gRPC channel, and the replicas."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

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
from extproc.envoy.eds import PoolMembers, load_assignment
from extproc.envoy.eds_server import ENDPOINTS, METHOD, SERVICE, Catalog, EdsServer, Subscription
from extproc.replica_state import ReplicaState
from extproc.share.lists import Put
from extproc.share.replicas import Removed, Snapshot
from tests.conftest import Logged
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S

REFUSED = "envoy refused the replicas and keeps its old ones"
NOT_SERVED = "envoy asks for unknown pools: set pools"


def request(*names: str, answering: DiscoveryResponse | None = None, refusal: str = "") -> bytes:
    """Subscribes; or takes the response it answers, or refuses it with a reason."""
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


def values(response: DiscoveryResponse | None) -> list[bytes]:
    assert response is not None
    assert response.type_url == ENDPOINTS
    assert {one.type_url for one in response.resources} == {ENDPOINTS}
    return [one.value for one in response.resources]


class EdsStream:
    """The state of a stream."""

    def __init__(self, catalog: Catalog) -> None:
        self._subscription = Subscription(catalog, "peer")

    def ask(
        self, *names: str, answering: DiscoveryResponse | None = None, refusal: str = ""
    ) -> DiscoveryResponse | None:
        """Returns the response to a request, if any."""
        raw = request(*names, answering=answering, refusal=refusal)
        self._subscription.take(DiscoveryRequest.parse(raw))
        return self.due()

    def due(self) -> DiscoveryResponse | None:
        return self._subscription.due()


def test_a_change_is_sent_once_to_those_who_asked_for_it() -> None:
    catalog = Catalog({"a": b"a1", "b": b"b1"})
    stream = EdsStream(catalog)
    first = stream.ask("a")
    assert values(first) == [b"a1"]
    assert stream.ask("a", answering=first) is None
    catalog.put("b", b"b2")
    assert stream.due() is None
    catalog.put("a", b"a2")
    second = stream.due()
    assert values(second) == [b"a2"]
    assert first is not None
    assert second is not None
    assert second.version_info != first.version_info
    assert second.nonce != first.nonce
    assert stream.due() is None


def test_more_names_get_more() -> None:
    stream = EdsStream(Catalog({"a": b"a1", "b": b"b1"}))
    assert values(stream.ask("a", "b", answering=stream.ask("b"))) == [b"a1", b"b1"]


def test_an_answer_to_an_older_response_says_nothing() -> None:
    catalog = Catalog({"a": b"a1", "b": b"b1"})
    stream = EdsStream(catalog)
    first = stream.ask("a")
    catalog.put("a", b"a2")
    second = stream.due()
    assert stream.ask("b", answering=first) is None
    assert stream.ask("a", answering=second) is None


def test_a_refusal_is_logged_once_and_its_version_is_not_repeated(logged: Logged) -> None:
    catalog = Catalog({"a": b"a1"})
    stream = EdsStream(catalog)
    first = stream.ask("a")
    for _ in range(2):
        assert stream.ask("a", answering=first, refusal="no such locality") is None
    (line,) = logged.lines(REFUSED)
    assert (line["reason"], line["node"]) == ("no such locality", "envoy-1")
    catalog.put("a", b"a2")
    assert values(stream.due()) == [b"a2"]


def test_a_pool_without_a_known_replica_is_sent_once_it_has_one(logged: Logged) -> None:
    catalog = Catalog({"a": None, "b": b"b1"})
    stream = EdsStream(catalog)
    assert stream.ask("a") is None
    catalog.put("a", b"a1")
    assert values(stream.due()) == [b"a1"]
    assert not logged.lines(NOT_SERVED)


def test_a_pool_that_is_not_served_is_logged_with_those_that_are(logged: Logged) -> None:
    stream = EdsStream(Catalog({"default": b"a1"}))
    assert stream.ask("mine") is None
    (line,) = logged.lines(NOT_SERVED)
    assert (line["asked"], line["served"], line["node"]) == ("mine", "default", "envoy-1")


def test_every_server_gives_the_same_list_the_same_version() -> None:
    answers = [EdsStream(Catalog({"a": b"a1"})).ask("a") for _ in range(2)]
    assert len({one.version_info for one in answers if one is not None}) == 1


class Server(NamedTuple):
    """A server on a port of its own."""

    catalog: Catalog
    server: EdsServer
    channel: grpc.aio.Channel

    def stream(self) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
        return self.channel.stream_stream(f"/{SERVICE}/{METHOD}")()


async def response(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> DiscoveryResponse:
    """The next one, which must come."""
    async with asyncio.timeout(PATIENCE_S):
        raw = await call.read()
    assert raw is not EOF, "the stream ended"
    return DiscoveryResponse.parse(raw)


@pytest.fixture
async def eds() -> AsyncIterator[Server]:
    catalog = Catalog({"a": b"a1"})
    server = EdsServer(catalog, MutualTlsSettings())
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Server(catalog, server, channel)
    await server.stop()


async def test_changes_are_sent_until_the_stream_ends_which_leaves_nothing(eds: Server) -> None:
    for number in range(3):
        call = eds.stream()
        await call.write(request("a"))
        await response(call)
        eds.catalog.put("a", b"a%d" % number)
        assert values(await response(call)) == [b"a%d" % number]
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    assert not eds.catalog.watchers


async def test_garbage_ends_its_stream_alone(eds: Server, logged: Logged) -> None:
    broken, good = eds.stream(), eds.stream()
    await broken.write(b"\x0a\xff\xff\xff")
    assert await broken.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(logged.lines("stream closed: message is not a DiscoveryRequest")) == 1
    await good.write(request("a"))
    assert values(await response(good)) == [b"a1"]


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_is_told(eds: Server, service: str) -> None:
    kinds = health_pb2.HealthCheckResponse
    health = health_pb2_grpc.HealthStub(eds.channel)
    for serves, status in ((True, kinds.SERVING), (False, kinds.NOT_SERVING)):
        await eds.server.report(serving=serves)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == status


async def test_streams_that_are_sent_away_end_and_new_ones_are_served(eds: Server) -> None:
    for _ in range(2):
        call = eds.stream()
        await call.write(request("a"))
        assert values(await response(call)) == [b"a1"]
        eds.server.close_streams()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_address_that_is_taken_is_named() -> None:
    first = EdsServer(Catalog({}), MutualTlsSettings())
    port = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} \(eds\.listen\)"):
        await EdsServer(Catalog({}), MutualTlsSettings()).start(f"127.0.0.1:{port}")
    await first.stop()


A, B = ReplicaState(id="10.0.0.1:8000"), ReplicaState(id="[::1]:8000")
TTL_S = 10.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def members(clock: ManualClock) -> PoolMembers:
    return PoolMembers(clock)


def test_nothing_is_told_before_a_replica_is_heard_of(members: PoolMembers) -> None:
    assert not members.apply(Snapshot(()))
    assert members.current is None
    assert members.apply(Snapshot((A,)))
    assert members.current == {A.id: HealthStatus.HEALTHY}


def test_health_and_draining_follow_the_polls(members: PoolMembers) -> None:
    members.apply(Snapshot((A, B)))
    assert not members.apply(Put(structs.replace(A, running=7)))
    assert members.apply(Put(structs.replace(A, healthy=False)))
    assert members.apply(Put(structs.replace(B, draining=True)))
    assert members.current == {A.id: HealthStatus.UNHEALTHY, B.id: HealthStatus.DRAINING}
    assert members.apply(Put(A))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.DRAINING}


def test_a_replica_that_is_removed_leaves_even_the_last(members: PoolMembers) -> None:
    members.apply(Snapshot((A,)))
    assert members.apply(Removed(A.id))
    assert not members.apply(Removed(A.id))
    assert members.current == {}


def test_who_is_missing_in_a_new_snapshot_stays(members: PoolMembers) -> None:
    members.apply(Snapshot((A, B)))
    assert not members.apply(Snapshot((A,)))
    assert not members.apply(Snapshot(()))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.HEALTHY}


def hear(
    members: PoolMembers, clock: ManualClock, seconds: int, *polled: ReplicaState
) -> list[str]:
    """Polls once a second; returns the replicas that left."""
    left = []
    for _ in range(seconds):
        clock.advance(1)
        for state in polled:
            members.apply(Put(state))
        left += members.drop_stale(TTL_S)
    return left


def test_who_is_silent_while_others_are_heard_leaves(
    members: PoolMembers, clock: ManualClock
) -> None:
    hear(members, clock, 20, A, B)
    assert hear(members, clock, 10, A) == []
    assert hear(members, clock, 1, A) == [B.id]
    assert members.current == {A.id: HealthStatus.HEALTHY}


def test_when_nothing_is_heard_nobody_leaves(members: PoolMembers, clock: ManualClock) -> None:
    hear(members, clock, 20, A, B)
    assert hear(members, clock, 1000) == []
    # Back, and empty: the others have the time of their life to be heard again.
    assert hear(members, clock, 10, A) == []
    assert hear(members, clock, 1, A) == [B.id]


def test_endpoints_are_what_envoy_reads() -> None:
    members = {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.DRAINING}
    read = ClusterLoadAssignment.parse(load_assignment("batch", members))
    assert read.cluster_name == "batch"
    (locality,) = read.endpoints
    assert [one.to_dict() for one in locality.lb_endpoints] == [
        {"endpoint": {"address": {"socketAddress": {"address": host, "portValue": 8000}}}, **health}
        for host, health in (
            ("10.0.0.1", {"healthStatus": "HEALTHY"}),
            ("::1", {"healthStatus": "DRAINING"}),
        )
    ]


def test_a_pool_without_replicas_is_one_without_endpoints() -> None:
    read = ClusterLoadAssignment.parse(load_assignment("batch", {}))
    assert [one.lb_endpoints for one in read.endpoints] == [[]]

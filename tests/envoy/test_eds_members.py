"""Which replicas Envoy is told of."""

from envoy_data_plane.envoy.config.core.v3 import HealthStatus
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from msgspec import structs

from extproc.envoy.eds import PoolMembers, load_assignment
from extproc.replica_state import ReplicaState
from extproc.share.replicas import Put, Removed, Snapshot
from tests.fakes import ManualClock

A, B = ReplicaState(id="10.0.0.1:8000"), ReplicaState(id="[::1]:8000")
TTL_S = 10.0


def test_nothing_is_told_before_a_replica_is_heard_of() -> None:
    members = PoolMembers(ManualClock())
    assert not members.apply(Snapshot(()))
    assert members.current is None
    assert members.apply(Snapshot((A,)))
    assert members.current == {A.id: HealthStatus.HEALTHY}


def test_health_and_draining_follow_the_polls() -> None:
    members = PoolMembers(ManualClock())
    members.apply(Snapshot((A, B)))
    assert not members.apply(Put(structs.replace(A, running=7)))
    assert members.apply(Put(structs.replace(A, healthy=False)))
    assert members.apply(Put(structs.replace(B, draining=True)))
    assert members.current == {A.id: HealthStatus.UNHEALTHY, B.id: HealthStatus.DRAINING}
    assert members.apply(Put(A))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.DRAINING}


def test_a_replica_that_is_removed_leaves_even_the_last() -> None:
    members = PoolMembers(ManualClock())
    members.apply(Snapshot((A,)))
    assert members.apply(Removed(A.id))
    assert not members.apply(Removed(A.id))
    assert members.current == {}


def test_who_is_missing_in_a_new_snapshot_stays() -> None:
    members = PoolMembers(ManualClock())
    members.apply(Snapshot((A, B)))
    assert not members.apply(Snapshot((A,)))
    assert not members.apply(Snapshot(()))
    assert members.current == {A.id: HealthStatus.HEALTHY, B.id: HealthStatus.HEALTHY}


def hear(
    members: PoolMembers, clock: ManualClock, seconds: int, *states: ReplicaState
) -> list[str]:
    """Polls once a second; returns who left."""
    left = []
    for _ in range(seconds):
        clock.advance(1)
        for state in states:
            members.apply(Put(state))
        left += members.drop_silent(TTL_S)
    return left


def test_who_is_silent_while_others_are_heard_leaves() -> None:
    clock = ManualClock()
    members = PoolMembers(clock)
    hear(members, clock, 20, A, B)
    assert hear(members, clock, 10, A) == []
    assert hear(members, clock, 1, A) == [B.id]
    assert members.current == {A.id: HealthStatus.HEALTHY}


def test_when_nothing_is_heard_nobody_leaves() -> None:
    clock = ManualClock()
    members = PoolMembers(clock)
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
    found = []
    for one in locality.lb_endpoints:
        assert one.endpoint
        assert one.endpoint.address
        assert one.endpoint.address.socket_address
        where = one.endpoint.address.socket_address
        found.append((where.address, where.port_value, one.health_status))
    assert found == [
        ("10.0.0.1", 8000, HealthStatus.HEALTHY),
        ("::1", 8000, HealthStatus.DRAINING),
    ]


def test_a_pool_without_replicas_is_one_without_endpoints() -> None:
    read = ClusterLoadAssignment.parse(load_assignment("batch", {}))
    assert [one.lb_endpoints for one in read.endpoints] == [[]]

from extproc.fleet.health import Health
from tests.fakes import ManualClock


def test_trouble_ends_when_the_replica_is_well_or_nothing_fails_any_more() -> None:
    clock = ManualClock()
    health = Health(clock)
    assert not health.troubled
    health.failed("a")
    assert health.troubled
    health.answered("a")
    assert not health.troubled
    health.failed("dead")
    clock.advance(59)
    assert health.troubled
    clock.advance(2)
    assert not health.troubled, "nobody has sent it anything, for it is dead"
    health.failed("dead")
    assert health.troubled
    health.forget("dead")
    assert not health.troubled

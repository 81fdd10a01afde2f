import os
import sys
from errno import ENOSYS
from threading import Event, Thread

import pytest

from extproc.proxy.transport import patient

if sys.platform != "linux":
    pytest.skip("only Linux schedules threads so", allow_module_level=True)


def test_threads_started_inside_are_patient_and_the_one_that_starts_them_is_not() -> None:
    ended = Event()
    policies = []

    def run() -> None:
        child = Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
        child.start()
        child.join()
        ended.wait()
        policies.append(os.sched_getscheduler(0))

    with patient():
        inside = Thread(target=run)
        inside.start()
    try:
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        ended.set()
        inside.join()
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH], "its own child, and itself"


def test_it_ends_as_it_began_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), patient():
        raise ValueError("no")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_threads_cannot_be_scheduled_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on musl, which has the call and never does it."""

    def refuse(_: int) -> int:
        raise OSError(ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    with patient():
        pass

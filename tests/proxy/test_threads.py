import os
import sys
from errno import ENOSYS
from threading import Event, Thread

import pytest

from extproc.proxy.transport import patient

if sys.platform != "linux":
    pytest.skip("only Linux schedules threads so", allow_module_level=True)


def test_patient_schedules_only_new_threads_as_batch() -> None:
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


def test_patient_restores_scheduling_after_error() -> None:
    with pytest.raises(ValueError, match="no"), patient():
        raise ValueError("no")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_patient_tolerates_missing_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on musl, which has the call and never does it."""

    def refuse(_: int) -> int:
        raise OSError(ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    with patient():
        pass

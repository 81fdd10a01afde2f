"""Worker processes and their supervisor, as they are seen from outside."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from extproc.config import Config
from extproc.lab.harness.ports import pick_ports
from extproc.proxy.supervisor import Worker, keep_running
from tests.children import worker_pid
from tests.conftest import Logged
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S, until


def configured(**serve: object) -> Config:
    return Config.model_validate({"serve": serve, "route": {"seed": 7}})


def test_each_worker_has_ports_and_a_seed_of_its_own() -> None:
    config = configured(workers=3, listen="[::1]:50051", admin="127.0.0.1:9090")
    workers = [config.of_worker(number) for number in range(3)]
    assert [one.serve.listen for one in workers] == ["[::1]:50051", "[::1]:50052", "[::1]:50053"]
    assert [one.serve.admin for one in workers] == [f"127.0.0.1:909{k}" for k in range(3)]
    assert [one.route.seed for one in workers] == [7, 8, 9]


def test_a_free_port_is_free_for_every_worker() -> None:
    assert configured(workers=2, listen="h:0", admin="h:0").of_worker(1).serve.listen == "h:0"


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ({"workers": 0}, "greater than or equal to 1"),
        ({"workers": 3, "listen": "h:65534"}, "there is no port 65536"),
        ({"workers": 3, "listen": "h:9088"}, r"\(h:9088 to h:9090\) .* overlap"),
        ({"workers": 3, "listen": "h:9092"}, "overlap"),
    ],
)
def test_workers_without_ports_are_refused(serve: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        configured(**serve)


def test_neighbouring_ports_are_fine() -> None:
    assert configured(workers=3, listen="h:9087").serve.workers == 3
    assert configured(workers=1, listen="10.0.0.1:9090").serve.workers == 1


class Supervisor:
    """``extproc serve`` with several workers, and what it logs."""

    def __init__(self, listen: int, admin: int, workers: int = 2) -> None:
        settings = {
            "workers": str(workers),
            "serve.listen": f"127.0.0.1:{listen}",
            "serve.admin": f"127.0.0.1:{admin}",
            "redis.url": "redis://127.0.0.1:1",
            "log.format": "json",
        }
        flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "extproc", "serve", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("EXTPROC_")},
        )

    def line(self, message: str) -> dict[str, Any]:
        """Waits for the next line with this message."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            line: dict[str, Any] = json.loads(text)
            if line["message"] == message:
                return line
        raise AssertionError(f"it ended without {message!r}")

    def rest(self) -> str:
        """What it and its workers still say; ends when the last of them has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


def two_runs() -> tuple[int, int]:
    """Ports for two workers each, to listen on and for people."""
    ports = pick_ports({"listen": 0, "admin": 0}, {"listen": 2, "admin": 2})
    return ports["listen"], ports["admin"]


@contextmanager
def supervised() -> Iterator[tuple[Supervisor, int]]:
    """Two workers that serve, and the first one's admin port."""
    listen, admin = two_runs()
    supervisor = Supervisor(listen, admin)
    with supervisor.process as process:
        try:
            supervisor.line("workers ready")
            yield supervisor, admin
        finally:
            process.kill()


def taken(port: int) -> socket.socket:
    """A server on a port, as soon as who has it has ended."""
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))


def metrics(admin: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=PATIENCE_S) as page:
        return list(page.read().decode().splitlines())


@pytest.mark.process
def test_workers_serve_under_numbers_of_their_own() -> None:
    with supervised() as (supervisor, admin):
        for number in range(2):
            assert f"extproc_worker {number}.0" in metrics(admin + number)
        supervisor.process.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in supervisor.rest().splitlines()]
    assert supervisor.process.returncode == 0
    assert {line["worker"] for line in lines if line["message"] == "stopping"} == {0, 1}


@pytest.mark.process
def test_a_worker_that_dies_is_started_again_though_its_port_was_taken_meanwhile() -> None:
    with supervised() as (supervisor, admin):
        other = worker_pid(supervisor.process.pid, 0)
        supervisor.process.send_signal(signal.SIGSTOP)  # or the next one might be sooner there
        os.kill(worker_pid(supervisor.process.pid, 1), signal.SIGKILL)
        with taken(admin + 1):
            supervisor.process.send_signal(signal.SIGCONT)
            line = supervisor.line("a worker ended and is started again")
            assert (line["worker"], line["reason"]) == (1, "ended by SIGKILL")
            line = supervisor.line("a worker ended and is started again")
            assert f"cannot listen on 127.0.0.1:{admin + 1}" in line["reason"]
        supervisor.line("router ready")
        assert "extproc_worker 1.0" in metrics(admin + 1)
        assert worker_pid(supervisor.process.pid, 0) == other


class Mortal(Worker):
    """Ends when a test says so, and starts at once."""

    def __init__(self) -> None:
        super().__init__(1, configured(workers=2))
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.starts = 0

    async def ended(self) -> str:
        return await self.ends.get()

    async def start(self) -> str:
        self.starts += 1
        return ""

    def started(self, times: int) -> bool:
        return self.starts == times


async def test_one_that_dies_again_and_again_is_started_each_time_later(logged: Logged) -> None:
    clock, worker = ManualClock(), Mortal()
    running = asyncio.create_task(keep_running(worker, clock, Random(1)))
    await asyncio.sleep(0)
    for times, lived in enumerate((0.0, 5.0, 10.0), start=1):
        clock.advance(lived)
        worker.ends.put_nowait("ended by SIGKILL")
        await until(partial(worker.started, times))
    running.cancel()
    waits = [
        float(str(line["again_in_s"]))
        for line in logged.lines("a worker ended and is started again")
    ]
    # 0.1 s and 0.2 s, each cut by up to half; and 0.1 s again after it was well for ten seconds
    expected = ((0.05, 0.1), (0.1, 0.2), (0.05, 0.1))
    assert all(least <= wait <= most for wait, (least, most) in zip(waits, expected, strict=True))


async def test_a_process_that_cannot_be_had_is_a_reason_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reason = await Worker(0, configured(workers=2)).start()
    assert reason == "no process can be started: No such file or directory"


@pytest.mark.process
def test_no_worker_outlives_a_killed_supervisor() -> None:
    with supervised() as (supervisor, _):
        supervisor.process.kill()
        said = supervisor.rest()  # ends with the last worker, which holds the other end
    assert said.count("the supervisor is gone: this worker ends") == 2


@pytest.mark.process
def test_a_worker_that_cannot_start_ends_them_all() -> None:
    listen, admin = two_runs()
    with socket.create_server(("127.0.0.1", listen + 1)):
        supervisor = Supervisor(listen, admin)
        with supervisor.process as process:
            *_, last = supervisor.rest().splitlines()
    assert process.returncode == 1
    assert last.startswith("extproc serve: worker 1: cannot listen for Envoy on 127.0.0.1:")
    assert str(listen + 1) in last

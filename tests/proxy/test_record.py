"""The record of traffic that a router writes."""

import asyncio
import errno
import json
import os
import stat
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.lab.replay.recorded import Recorded, read
from extproc.observe.decision import RequestOutcome
from extproc.observe.record import keys_of
from extproc.observe.recorder import _NOT_WRITTEN, Recorder
from extproc.proxy.app import build
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import ManualClock, chat, replica
from tests.proxy.conftest import config_of, router_of, samples
from tests.proxy.envoy_side import CHAT, EnvoySide, Local, Stream
from tests.proxy.replies import BodyMode, destination
from tests.waiting import until

CANARY = "xylophone"
LEAST = 1_000_000
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": f"{CANARY} indeed"}}],
    "usage": {"prompt_tokens": 77, "completion_tokens": 9},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "record"


@pytest.fixture
def config(folder: Path) -> Config:
    return config_of(
        record={"path": str(folder), "max_bytes": LEAST},
        request={"tenant_header": "x-tenant"},
        route={"session_header": "x-session", "policy": "lmetric"},
    )


async def write_record(services: Services) -> None:
    assert services.recorder is not None
    writing = asyncio.create_task(services.recorder.run())
    await asyncio.sleep(0)
    writing.cancel()
    with suppress(asyncio.CancelledError):
        await writing


async def ask(envoy: EnvoySide, body: dict[str, Any], status: int = 200) -> None:
    headers = {"x-tenant": f"{CANARY} ltd", "x-session": f"{CANARY}-1"}
    async with envoy.stream() as stream:
        to = destination(await stream.body_first(body, headers=headers))
        await stream.answer(ANSWER, status=status, upstream=to[0])


async def recorded(services: Services, folder: Path) -> Recorded:
    await until(lambda: services.fleet.in_flight == 0)
    await write_record(services)
    return read(folder)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def text_in(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.iterdir()).lower()


def cut(folder: Path) -> None:
    """Cuts the last line, as a process does that is killed while it writes."""
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-9])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@contextmanager
def full_disk() -> Iterator[None]:
    """Imitates a full disk: files can be created, but nothing can be written."""
    really = Path.open

    def to_open(file: Path, mode: str) -> None:
        really(file, mode).close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", to_open)
        yield


def hanging_disk(folder: Path) -> Path:
    """Imitates a hanging disk: opening the record blocks until a reader opens the pipe."""
    pipe = folder / "default-50051.jsonl"
    os.mkfifo(pipe)
    return pipe


async def many(services: Services, requests: int = 400) -> None:
    """Writes records of requests, by default as many as a file may hold."""
    assert services.recorder is not None
    for number in range(requests):
        services.recorder.ended(chat(number), RequestOutcome(status=200), replica(1), 0.0, 5.0)
    await write_record(services)


async def test_full_disk_keeps_earlier_records(services: Services, folder: Path) -> None:
    for _ in range(20):
        await many(services)
    before = size_of(folder)
    with full_disk():
        for _ in range(5):
            await many(services)
    assert size_of(folder) > before / 2
    (empty,) = [file for file in files_in(folder) if not file.read_bytes()]
    assert len(read(folder).requests) > 800
    await many(services)
    assert len(read(empty).requests) == 400


async def test_full_disk_counts_unwritten_requests(services: Services, folder: Path) -> None:
    await many(services)
    with full_disk():
        await many(services)
        await many(services)
    await many(services)
    record = read(folder)
    assert len(record.requests) == 800
    assert record.excluded == {"not written (the disk was full, or too slow)": 800}


async def test_hanging_disk_does_not_delay_shutdown(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.observe.recorder._LAST_S", 0.05)
    pipe = hanging_disk(folder)
    await write_record(services)
    assert b'"kind":"start"' in await asyncio.to_thread(pipe.read_bytes)


async def test_hanging_disk_bounds_record_memory(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.observe.recorder._MOST_PENDING", 3000)
    assert services.recorder is not None
    pipe = hanging_disk(folder)
    for turn in range(100):
        if turn == 50:
            writing = asyncio.create_task(services.recorder.run())
        services.recorder.ended(chat(10), RequestOutcome(status=200), replica(1), 0.0, 5.0)
        await asyncio.sleep(0)
    reads = os.open(pipe, os.O_RDWR)
    writing.cancel()
    with suppress(asyncio.CancelledError):
        await writing
    lines = os.read(reads, 1 << 16).splitlines()
    os.close(reads)
    requests = [line for line in lines if b'"kind":"request"' in line]
    assert requests
    assert sum(map(len, requests)) < 4000
    lost = [json.loads(line)["requests"] for line in lines if b'"kind":"lost"' in line]
    assert len(requests) + sum(lost) == 100


async def test_record_survives_time_jump(services: Services, config: Config, folder: Path) -> None:
    clock, wall = ManualClock(100.0), ManualClock(1e9)
    recorder = Recorder(config, folder, services.fleet, clock, wall)
    moved = replace(services, recorder=recorder)
    for _ in range(3):
        await write_record(moved)
        clock.advance(10.0)
        wall.advance(-3600.0)
    states = {line for line in text_in(folder).splitlines() if '"kind":"replica"' in line}
    assert len(states) == 2 * 3


async def test_record_holds_no_text(services: Services, envoy: EnvoySide, folder: Path) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": f"the {CANARY} " * 60}]}
    await ask(envoy, body | {"max_tokens": 40})
    await ask(envoy, body, status=503)
    record = await recorded(services, folder)
    (request,) = record.requests
    assert record.excluded == {"failed": 1}
    assert record.start.config["route"]["policy"] == "lmetric"
    assert (request.prompt_tokens, request.output_tokens) == (77, 9)
    assert request.output_bound == 40
    assert request.complete
    assert request.replica in record.replicas
    assert request.keys
    assert set(record.replicas) == {replica(1), replica(2)}
    assert CANARY not in text_in(folder)
    (file,) = files_in(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_record_counts_refusals(services: Services, envoy: EnvoySide, folder: Path) -> None:
    await ask(envoy, CHAT)
    reply = await envoy.ask_body_first(CHAT | {"model": "nobody's"})
    assert reply.immediate_response is not None
    record = await recorded(services, folder)
    assert record.excluded == {"refused (model_not_found)": 1}


async def test_record_has_no_refusal_of_requests_that_envoy_routes(
    services: Services, folder: Path, config: Config
) -> None:
    """An observed request that names no served model, and a request in an unserved body mode."""
    observe = config.serve.model_copy(update={"mode": "observe"})
    observing = replace(services, config=config.model_copy(update={"serve": observe}))
    await EnvoySide(Local(observing)).ask_body_first(CHAT | {"model": "nobody's"})
    async with EnvoySide(Local(services)).stream() as stream:
        await stream.request_headers(body_mode=BodyMode.STREAMED)
        await stream.end()
    assert samples(services.metrics.requests) == {("observed",): 1.0, ("unrouted",): 1.0}
    await write_record(services)
    assert "refused" not in text_in(folder)


async def test_refused_request_is_recorded_with_its_profile(folder: Path, config: Config) -> None:
    services = router_of(config)
    envoy = EnvoySide(Local(services))
    await ask(envoy, CHAT)
    await until(lambda: services.fleet.in_flight == 0)
    route = config.route.model_copy(update={"max_ttft_s": 1e-6})
    impatient = replace(services, config=config.model_copy(update={"route": route}))
    reply = await EnvoySide(Local(impatient)).ask_body_first(CHAT | {"max_tokens": 33})
    assert reply.immediate_response is not None
    await write_record(services)
    [refused] = read(folder).refused
    assert (refused.refused, refused.replica, refused.output_bound) == ("saturated", "", 33)
    assert refused.estimated_tokens > 0


async def test_restart_continues_record(
    services: Services, envoy: EnvoySide, folder: Path, config: Config
) -> None:
    await ask(envoy, CHAT)
    await until(lambda: services.fleet.in_flight == 0)
    await write_record(services)
    cut(folder)
    again = build(config, CollectorRegistry())
    assert again.recorder is not None
    again.recorder.ended(chat(10), RequestOutcome(completion_s=1.0), replica(1), 0.0, 5.0)
    await write_record(again)
    record = read(folder)
    assert sorted(request.prompt_tokens for request in record.requests) == [10, 77]
    assert record.excluded == {"whose line cannot be read": 1}


async def test_record_files_are_bounded_and_readable(services: Services, folder: Path) -> None:
    for _ in range(20):
        await many(services, 500)
    files = files_in(folder)
    assert len(files) == 4
    assert LEAST / 2 < size_of(folder) <= LEAST
    for file in files:
        assert replica(1) in read(file).replicas


async def test_record_is_readable_after_its_file_or_folder_was_moved_away(
    services: Services, folder: Path
) -> None:
    for place in ("first", "second"):
        await many(services, 10)
        (file,) = files_in(folder)
        moved = file.replace(folder.parent / place)
        assert len(read(moved).requests) == 10
    await asyncio.to_thread(folder.rmdir)
    await many(services, 10)
    assert len(read(folder).requests) == 10


async def test_full_disk_and_its_end_are_logged_once(services: Services, logged: Logged) -> None:
    with full_disk():
        await many(services)
        await many(services)
    await many(services)
    await many(services)
    begun, over = logged.lines()
    assert (begun["msg"], begun["levelname"], begun["error"]) == (
        _NOT_WRITTEN,
        "ERROR",
        "No space left on device",
    )
    assert over["msg"] == "record of traffic is written again"


def test_unusable_record_folder_fails_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = config_of(record={"path": str(tmp_path / "file" / "record")})
    with pytest.raises(OSError, match=r"file/record \(record\.path\): Not a directory"):
        build(config, CollectorRegistry())


async def test_record_truncates_prefix_keys(
    services: Services, envoy: EnvoySide, folder: Path
) -> None:
    """Whole keys would reveal the sum of a unit's words."""
    content = "".join(map(str, range(1000)))
    await ask(envoy, CHAT | {"messages": [{"role": "user", "content": content}]})
    (asked,) = (await recorded(services, folder)).requests
    units = 2890 // 256  # in bytes: the digits of these numbers
    assert len(b64decode(asked.keys)) == 4 * units
    assert len(set(keys_of(asked.keys).tolist())) == units
    assert 0 < asked.whole < 2**32


async def test_record_marks_cut_answers(
    services: Services, envoy: EnvoySide, folder: Path, stream: Stream
) -> None:
    await ask(envoy, CHAT)
    await envoy.ask_body_first()
    to = destination(await stream.body_first(CHAT | {"stream": True}))[0]
    await stream.response_headers(upstream=to, content_type="text/event-stream")
    await stream.response_body(b"data: {}\n\n", end_of_stream=False)
    await stream.end()
    record = await recorded(services, folder)
    assert record.excluded == {"failed": 1}
    assert sorted(request.cut for request in record.requests) == [False, True]

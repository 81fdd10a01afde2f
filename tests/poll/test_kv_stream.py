"""The stream of KV events over real sockets: gaps, replays, publishers that start anew or hang."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import zmq
import zmq.asyncio

from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic
from extproc.lab.harness.processes import free_port
from extproc.poll import kv_stream
from extproc.poll.destination import Destination, IntoFleet
from extproc.poll.discovery import Target
from extproc.poll.kv_blocks import KvBlocks, Mark
from extproc.poll.kv_events import Event
from extproc.poll.kv_stream import KvStream
from extproc.predict.lengths import OutputLengths
from tests.conftest import Logged
from tests.poll.test_kv_blocks import CLEARED, KEYS, as_arrays, as_maps, removed, stored
from tests.waiting import PATIENCE_S, until

UNTOLD = "replica's KV blocks are unknown: routers estimate its prefix cache"
TOLD = "replica's KV blocks are known again"


class Engine:
    """Publishes as vLLM does, and loses what a test wants lost."""

    def __init__(self, context: zmq.asyncio.Context, ports: tuple[int, int]) -> None:
        self._context = context
        self._ports = ports
        self._encode: Callable[[list[dict[str, Any]]], bytes] = as_maps
        self.old = False  # whether it is a version that replays without a topic
        self.silent = False
        self.replays = 0

    async def start(self, first: int = 0) -> None:
        self._encode = as_arrays if self.old else as_maps
        self._number = first
        self.kept: list[tuple[bytes, bytes]] = []
        self._pushes, self._asked = map(self._context.socket, (zmq.PUB, zmq.ROUTER))
        for socket, port in zip((self._pushes, self._asked), self._ports, strict=True):
            socket.linger = 0
            await _bind(socket, port)
        self._answering = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._pushes.close()
        self._asked.close()

    async def tell(self, *events: dict[str, Any], pushed: bool = True) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self.kept.append((number, self._encode([*events])))
        if pushed:
            await self._pushes.send_multipart((b"kv@pod", *self.kept[-1]))

    async def _answer(self) -> None:
        topic = () if self.old else (b"kv@pod",)
        while True:
            asker, empty, start = await self._asked.recv_multipart()
            assert empty == b""
            if self.silent:
                continue
            self.replays += 1
            for number, content in self.kept:
                if number >= start:
                    await self._asked.send_multipart((asker, b"", *topic, number, content))
            end = (-1).to_bytes(8, "big", signed=True)
            await self._asked.send_multipart((asker, b"", *((b"",) if topic else ()), end, b""))


async def _bind(socket: zmq.asyncio.Socket, port: int) -> None:
    """A socket that was closed lets go of its port a moment later."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


class Followed(Destination):
    """What a poller makes of it."""

    def __init__(
        self, context: zmq.asyncio.Context, ports: tuple[int, int], kept: bytes = b""
    ) -> None:
        super().__init__()
        self.kept = kept
        self.saves = 0
        target = Target("127.0.0.1:8000", "one", "llama-8b-a10", ports)
        self._blocks = KvBlocks(Random(1), monotonic)
        self.stream = KvStream(context, target, ports, self._blocks, self, monotonic)
        self.held: set[int] = set()
        self._some = asyncio.Event()

    async def load_blocks(self, replica: str) -> bytes:
        return self.kept

    async def save_blocks(self, replica: str, dump: Callable[[], bytes]) -> None:
        self.kept = dump()
        self.saves += 1

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        if told := self._blocks.next_update():
            if told[0].whole:
                self.held.clear()
            self.held -= {*told[0].removed.tolist()}
            self.held |= {*told[0].stored.tolist()}
        self._some.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._some.clear()
                await self._some.wait()

    async def holds(self, *keys: int) -> None:
        await self.until(lambda: self.held == {*keys} and self.stream.number is not None)

    async def knows_nothing(self) -> None:
        await self.until(lambda: self.stream.number is None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "CHECK_S", 0.05)
    monkeypatch.setattr("extproc.poll.kv_blocks._RESEND_S", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an answer that does not come."""
    monkeypatch.setattr(kv_stream, "_ANSWER_S", 0.2)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


@pytest.fixture
async def engine(context: zmq.asyncio.Context) -> AsyncIterator[Engine]:
    engine = Engine(context, (free_port(), free_port()))
    await engine.start()
    yield engine
    await engine.stop()


@asynccontextmanager
async def following(
    context: zmq.asyncio.Context, engine: Engine, kept: bytes = b""
) -> AsyncIterator[Followed]:
    followed = Followed(context, engine._ports, kept)
    task = asyncio.create_task(followed.stream.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.fixture
async def followed(context: zmq.asyncio.Context, engine: Engine) -> AsyncIterator[Followed]:
    async with following(context, engine) as followed:
        yield followed


@pytest.mark.parametrize("old", [False, True])
async def test_late_poller_hears_all(
    context: zmq.asyncio.Context, engine: Engine, old: bool
) -> None:
    engine.old = old
    await engine.stop()
    await engine.start()
    await engine.tell(stored(0, [11, 12]))
    await engine.tell(removed(12))
    async with following(context, engine) as followed:
        await followed.holds(KEYS[0])
        await engine.tell(stored(1, [12], parent=11))
        await followed.holds(*KEYS[:2])


async def test_silent_new_replica_is_known(followed: Followed, engine: Engine) -> None:
    await followed.holds()
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])


async def test_what_was_lost_is_had_again(followed: Followed, engine: Engine) -> None:
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])
    await engine.tell(stored(1, [12], parent=11), pushed=False)
    await engine.tell(stored(2, [13], parent=12))
    await followed.holds(*KEYS[:3])
    await engine.tell(removed(13), pushed=False)  # the last: no gap shows
    await followed.holds(*KEYS[:2])


@pytest.mark.parametrize("more", [0, 5])
async def test_restarted_engine_is_empty(followed: Followed, engine: Engine, more: int) -> None:
    await engine.tell(stored(0, [11]))
    await engine.tell(stored(1, [12], parent=11))
    await followed.holds(*KEYS[:2])
    await engine.stop()
    await engine.start()
    for _ in range(more):  # its numbers go beyond those before
        await engine.tell(stored(0, [21]))
    await followed.holds(*KEYS[: more > 0])


async def test_doubted_replica_is_believed_later(followed: Followed, engine: Engine) -> None:
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])
    followed.stream.invalidate()
    assert followed.stream.number is None
    await engine.stop()
    await engine.start()
    await until(lambda: followed.stream.number is not None)
    await followed.holds()


async def test_what_the_replica_no_longer_keeps_is_not_made_up(
    context: zmq.asyncio.Context, engine: Engine, logged: Logged
) -> None:
    await engine.tell(stored(0, [11]))
    await engine.tell(stored(1, [12], parent=11))
    del engine.kept[0]
    async with following(context, engine) as followed:
        line = await logged.line(UNTOLD)
        assert line["replica"] == "one (127.0.0.1:8000)"
        assert "buffer_steps" in str(line["error"])
        assert followed.stream.number is None
        await engine.tell(CLEARED)
        await engine.tell(stored(0, [11]))
        await followed.holds(KEYS[0])
    assert len(logged.lines()) == 2


async def test_next_poller_goes_on_from_save(context: zmq.asyncio.Context, engine: Engine) -> None:
    await engine.tell(stored(0, [11]), stored(0, [11]))
    await engine.tell(stored(1, [12], parent=11))
    async with following(context, engine) as first:
        await first.holds(*KEYS[:2])
        await first.until(lambda: bool(first.kept))
    await engine.tell(stored(2, [13], parent=12), removed(11))
    del engine.kept[0]
    async with following(context, engine, first.kept) as second:
        await second.holds(*KEYS[:3])
    del engine.kept[0]  # too late: what follows is not all there
    async with following(context, engine, first.kept) as third:
        await third.until(lambda: bool(third.stream._outage.problem))
        assert third.stream.number is None
    await engine.stop()
    await engine.start()
    await engine.tell(stored(0, [21]))
    await engine.tell(stored(1, [22], parent=21))
    async with following(context, engine, first.kept) as fourth:  # of another process
        await fourth.holds(*KEYS[:2])
    for garbage in (b"x", first.kept[:-1], first.kept[:-9]):
        async with following(context, engine, garbage) as fifth:
            await fifth.holds(*KEYS[:2])


async def test_what_has_not_changed_is_not_saved_again(
    context: zmq.asyncio.Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_stream, "SAVE_S", 0.0)
    await engine.tell(stored(0, [11]))
    async with following(context, engine) as followed:
        await followed.until(lambda: followed.saves == 1)
        await engine.tell(stored(1, [12], parent=11))
        await followed.until(lambda: followed.saves == 2)
        replays = engine.replays
        await followed.until(lambda: engine.replays > replays + 2)
        assert followed.saves == 2
        followed.stream.resend_all()  # nobody may have it any more
        await followed.until(lambda: followed.saves == 3)


class Itself(IntoFleet):
    """A router that polls."""

    def __init__(self) -> None:
        super().__init__(Fleet(OutputLengths()))
        self.looks: asyncio.Queue[None] = asyncio.Queue()

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        await super().blocks_changed(replica, blocks)
        self.looks.put_nowait(None)


async def test_a_router_that_polls_itself_dumps_nothing(
    context: zmq.asyncio.Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps: list[Mark] = []
    monkeypatch.setattr(KvBlocks, "dump", lambda _, mark: dumps.append(mark))
    async with following(context, engine) as followed:
        await followed.holds()
        followed.stream._into = router = Itself()
        followed.stream.resend_all()
        dumps.clear()
        for _ in range(4):
            await asyncio.wait_for(router.looks.get(), PATIENCE_S)
    assert not dumps


async def skip_a_number(engine: Engine) -> None:
    """As vLLM does where it cannot encode a batch."""
    engine._number += 1
    await engine.tell(stored(1, [12], parent=11))


async def tell_garbage(engine: Engine) -> None:
    await engine.tell({"type": "BlockStored"})


@pytest.mark.parametrize(
    ("mislead", "error"),
    [
        (skip_a_number, "a batch of its events is lost"),
        (tell_garbage, "malformed"),
    ],
)
async def test_misleading_engine_is_logged_once_until_it_clears_its_cache(
    followed: Followed,
    engine: Engine,
    logged: Logged,
    mislead: Callable[[Engine], Awaitable[None]],
    error: str,
) -> None:
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])
    await mislead(engine)
    line = await logged.line(UNTOLD)
    assert error in str(line["error"])
    replays = engine.replays
    await followed.until(lambda: engine.replays > replays + 2)
    assert followed.stream.number is None
    await engine.tell(CLEARED)
    await followed.holds()
    assert [line["msg"] for line in logged.lines()] == [UNTOLD, TOLD]


@pytest.mark.usefixtures("impatient")
async def test_one_that_does_not_answer_is_not_believed_until_it_does(
    followed: Followed, engine: Engine, logged: Logged
) -> None:
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])
    engine.silent = True
    await followed.knows_nothing()
    await engine.tell(stored(1, [12], parent=11))
    engine.silent = False
    await followed.holds(*KEYS[:2])
    assert [line["msg"] for line in logged.lines()][:2] == [
        UNTOLD,
        TOLD,
    ]


async def test_bad_frames_are_passed_over(followed: Followed, engine: Engine) -> None:
    await followed.holds()
    for frames in ((b"",), (b"", b"number", b"x"), (b"a", b"b", b"c", b"d")):
        await engine._pushes.send_multipart(frames)
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])


async def test_many_batches_are_all_had_and_others_have_their_turns_between_them(
    context: zmq.asyncio.Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_turn = most = 0
    apply = KvBlocks.apply

    def counted(blocks: KvBlocks, event: Event) -> None:
        nonlocal in_a_turn, most
        in_a_turn += 1
        most = max(most, in_a_turn)
        apply(blocks, event)

    async def turns() -> None:
        nonlocal in_a_turn
        while True:
            in_a_turn = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(KvBlocks, "apply", counted)
    turning = asyncio.create_task(turns())
    async with following(context, engine) as followed:
        await followed.holds()
        for number in range(5_000):
            of_its_own = {"token_ids": [number] * 16}
            await engine.tell(stored(0, [number]) | of_its_own, pushed=False)
        await followed.until(lambda: len(followed.held) == 5_000)
    turning.cancel()
    assert most <= 2


@pytest.mark.usefixtures("impatient")
async def test_too_large_is_refused(followed: Followed, engine: Engine, logged: Logged) -> None:
    await followed.holds()
    engine.kept.append((bytes(8), bytes(2**26 + 1)))
    await engine._pushes.send_multipart((b"kv@pod", *engine.kept[-1]))
    line = await logged.line(UNTOLD)
    assert "does not answer" in str(line["error"])
    engine.kept.clear()
    await engine.tell(stored(0, [11]))
    await followed.holds(KEYS[0])


async def test_bad_number_is_skipped(
    context: zmq.asyncio.Context, engine: Engine, logged: Logged
) -> None:
    engine.kept.append(((2**70).to_bytes(9, "big"), as_maps([])))
    async with following(context, engine) as followed:
        await logged.line(UNTOLD)
        replays = engine.replays
        await followed.until(lambda: engine.replays > replays + 2)
        engine.kept.clear()
        await engine.tell(stored(0, [11]))
        await followed.holds(KEYS[0])


async def test_what_nobody_foresaw_is_said_once_and_ends_nothing(
    context: zmq.asyncio.Context,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    followed: Followed,
) -> None:
    failures: asyncio.Queue[None] = asyncio.Queue()

    def fail(*_: object) -> None:
        failures.put_nowait(None)
        raise RuntimeError("odd")

    await followed.holds()
    with monkeypatch.context() as broken:
        broken.setattr(KvBlocks, "apply", fail)
        await engine.tell(stored(0, [11]))
        for _ in range(3):
            await asyncio.wait_for(failures.get(), PATIENCE_S)
        assert followed.stream.number is None
    await followed.holds(KEYS[0])
    assert [line.getMessage() for line in caplog.records] == [
        UNTOLD,
        TOLD,
    ]
    assert vars(caplog.records[0])["error"] == "RuntimeError: odd"

"""KV events over real sockets: gaps are replayed, restarts and losses make blocks unknown."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import zmq
import zmq.asyncio

from extproc.config import Config
from extproc.ground.clock import monotonic
from extproc.ground.runtime import started
from extproc.lab.harness.processes import free_port
from extproc.poll import kv_stream
from extproc.poll.destination import Destination
from extproc.poll.discovery import Target
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.kv_events import Event
from extproc.poll.kv_stream import KvStream
from extproc.poll.replica import PollContext, PolledReplica
from extproc.replica_state import ReplicaState
from tests.conftest import Logged
from tests.poll.polling import poller_of
from tests.poll.test_kv_blocks import CLEARED, KEYS, after, as_arrays, as_maps, removed, stored
from tests.waiting import PATIENCE_S, Changes, until

UNKNOWN = "replica's KV blocks are unknown: routers estimate its prefix cache"
KNOWN = "replica's KV blocks are known again"


class EventPublisher:
    """Publisher of KV events as vLLM's; a test may withhold or drop batches."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.context = context
        self.ports = free_port(), free_port()
        self._encode: Callable[[list[dict[str, Any]]], bytes] = as_maps
        self.old = False  # a version of vLLM that replays without a topic
        self.silent = False
        self.replays = 0

    async def start(self, first: int = 0) -> None:
        self._encode = as_arrays if self.old else as_maps
        self._number = first
        self.replayable: list[tuple[bytes, bytes]] = []
        self._pushes, self._replay = map(self.context.socket, (zmq.PUB, zmq.ROUTER))
        for socket, port in zip((self._pushes, self._replay), self.ports, strict=True):
            socket.linger = 0
            await _bind(socket, port)
        self._answering = asyncio.create_task(self._answer())

    async def stop(self) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._pushes.close()
        self._replay.close()

    async def publish(self, *events: dict[str, Any], pushed: bool = True) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self.replayable.append((number, self._encode([*events])))
        if pushed:
            await self._pushes.send_multipart((b"kv@pod", *self.replayable[-1]))

    async def _answer(self) -> None:
        topic = () if self.old else (b"kv@pod",)
        while True:
            client, empty, start = await self._replay.recv_multipart()
            assert empty == b""
            self.replays += 1
            if self.silent:
                continue
            for number, content in self.replayable:
                if number >= start:
                    await self._replay.send_multipart((client, b"", *topic, number, content))
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart((client, b"", *((b"",) if topic else ()), end, b""))


async def _bind(socket: zmq.asyncio.Socket, port: int) -> None:
    """Binds as soon as a closed socket has released the port."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


class Followed(Destination):
    """A poller's stream of the engine, and the blocks that its updates say the engine holds."""

    def __init__(self, engine: EventPublisher, saved: bytes) -> None:
        super().__init__()
        self.saved = saved
        self.saves = 0
        self.skips = 0  # saves to skip
        target = Target("127.0.0.1:8000", "one", "llama-8b-a10", engine.ports)
        self._blocks = KvBlocks(Random(1), monotonic)
        self.stream = KvStream(engine.context, target, self._blocks, self)
        self.held: set[int] = set()
        changes = Changes()
        self._note, self.until = changes.note, changes.until

    async def load_blocks(self, replica: str) -> bytes:
        return self.saved

    async def save_blocks(self, replica: str, dump: Callable[[], bytes]) -> bool:
        if self.skips:
            self.skips -= 1
            return False
        self.saved = dump()
        self.saves += 1
        return True

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        if update := self._blocks.next_update():
            self.held = after(update[0], self.held)
        self._note()

    async def holds(self, *keys: int) -> None:
        await self.until(lambda: self.held == {*keys} and self.stream.number is not None)

    async def knows_nothing(self) -> None:
        await until(lambda: self.stream.number is None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "CHECK_S", 0.05)
    monkeypatch.setattr("extproc.poll.kv_blocks._RESEND_S", 0.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stream, "_ANSWER_S", 0.2)


@pytest.fixture
async def engine() -> AsyncIterator[EventPublisher]:
    with zmq.asyncio.Context() as context:
        engine = EventPublisher(context)
        await engine.start()
        yield engine
        await engine.stop()


@asynccontextmanager
async def following(engine: EventPublisher, saved: bytes = b"") -> AsyncIterator[Followed]:
    followed = Followed(engine, saved)
    async with started(followed.stream.run()) as [task]:
        yield followed
    assert task.cancelled()


@pytest.fixture
async def followed(engine: EventPublisher) -> AsyncIterator[Followed]:
    async with following(engine) as followed:
        yield followed


@pytest.mark.parametrize("old", [False, True])
async def test_late_poller_replays_all_events(engine: EventPublisher, old: bool) -> None:
    engine.old = old
    await engine.stop()
    await engine.start()
    await engine.publish(stored(0, [11, 12]))
    await engine.publish(removed(12))
    async with following(engine) as followed:
        await followed.holds(KEYS[0])
        await engine.publish(stored(1, [12], parent=11))
        await followed.holds(*KEYS[:2])


async def test_lost_batches_are_replayed(followed: Followed, engine: EventPublisher) -> None:
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])
    await engine.publish(stored(1, [12], parent=11), pushed=False)
    await engine.publish(stored(2, [13], parent=12))
    await followed.holds(*KEYS[:3])
    await engine.publish(removed(13), pushed=False)  # the last batch: no later batch shows the gap
    await followed.holds(*KEYS[:2])


@pytest.mark.parametrize("more", [0, 5])
async def test_restarted_engine_holds_only_new_blocks(
    followed: Followed, engine: EventPublisher, more: int
) -> None:
    await engine.publish(stored(0, [11]))
    await engine.publish(stored(1, [12], parent=11))
    await followed.holds(*KEYS[:2])
    await engine.stop()
    await engine.start()
    for _ in range(more):  # batch numbers exceed those before the restart
        await engine.publish(stored(0, [21]))
    await followed.holds(*KEYS[: more > 0])


async def test_invalidated_blocks_are_known_after_the_next_check(
    followed: Followed, engine: EventPublisher
) -> None:
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])
    followed.stream.invalidate()
    assert followed.stream.number is None
    await engine.stop()
    await engine.start()
    await until(lambda: followed.stream.number is not None)
    await followed.holds()


async def test_blocks_are_unknown_if_the_oldest_events_cannot_be_replayed(
    engine: EventPublisher, logged: Logged
) -> None:
    await engine.publish(stored(0, [11]))
    await engine.publish(stored(1, [12], parent=11))
    del engine.replayable[0]
    async with following(engine) as followed:
        line = await logged.line(UNKNOWN)
        assert line["replica"] == "one (127.0.0.1:8000)"
        assert "buffer_steps" in str(line["error"])
        assert followed.stream.number is None
        await engine.publish(CLEARED)
        await engine.publish(stored(0, [11]))
        await followed.holds(KEYS[0])
    assert len(logged.lines()) == 2


async def test_next_poller_continues_from_saved_blocks(engine: EventPublisher) -> None:
    await engine.publish(stored(0, [11]), stored(0, [11]))
    await engine.publish(stored(1, [12], parent=11))
    async with following(engine) as first:
        await first.holds(*KEYS[:2])
        await first.until(lambda: bool(first.saved))
    await engine.publish(stored(2, [13], parent=12), removed(11))
    del engine.replayable[0]
    async with following(engine, first.saved) as second:
        await second.holds(*KEYS[:3])
    del engine.replayable[0]  # events after the save are missing
    async with following(engine, first.saved) as third:
        await third.until(lambda: bool(third.stream._outage.problem))
        assert third.stream.number is None
    await engine.stop()
    await engine.start()
    await engine.publish(stored(0, [21]))
    await engine.publish(stored(1, [22], parent=21))
    async with following(engine, first.saved) as fourth:  # saved from another process
        await fourth.holds(*KEYS[:2])
    for garbage in (b"x", first.saved[:-1], first.saved[:-9]):
        async with following(engine, garbage) as fifth:
            await fifth.holds(*KEYS[:2])


async def test_unchanged_blocks_are_not_saved_again(
    engine: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_stream, "SAVE_S", 0.0)
    await engine.publish(stored(0, [11]))
    async with following(engine) as followed:
        await followed.until(lambda: followed.saves == 1)
        await engine.publish(stored(1, [12], parent=11))
        await followed.until(lambda: followed.saves == 2)
        replays = engine.replays
        await followed.until(lambda: engine.replays > replays + 2)
        assert followed.saves == 2
        followed.stream.resend_all()  # Redis may have lost the save
        await followed.until(lambda: followed.saves == 3)


async def skip_a_number(engine: EventPublisher) -> None:
    """Skips a sequence number, as vLLM does if it cannot encode a batch."""
    engine._number += 1
    await engine.publish(stored(1, [12], parent=11))


async def publish_garbage(engine: EventPublisher) -> None:
    await engine.publish({"type": "BlockStored"})


@pytest.mark.parametrize(
    ("corrupt", "error"),
    [(skip_a_number, "a batch of its events is lost"), (publish_garbage, "malformed")],
)
async def test_lost_or_malformed_batch_is_logged_once_until_the_cache_is_cleared(
    followed: Followed,
    engine: EventPublisher,
    logged: Logged,
    corrupt: Callable[[EventPublisher], Awaitable[None]],
    error: str,
) -> None:
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])
    await corrupt(engine)
    line = await logged.line(UNKNOWN)
    assert error in str(line["error"])
    replays = engine.replays
    await followed.until(lambda: engine.replays > replays + 2)
    assert followed.stream.number is None
    await engine.publish(CLEARED)
    await followed.holds()
    assert [line["msg"] for line in logged.lines()] == [UNKNOWN, KNOWN]


@pytest.mark.usefixtures("impatient")
async def test_blocks_are_unknown_until_one_of_full_attention_is_stored(
    followed: Followed, engine: EventPublisher, logged: Logged
) -> None:
    await engine.publish(stored(0, [11], kv_cache_spec_kind="sliding_window", group_idx=0))
    line = await logged.line(UNKNOWN)
    assert line["error"] == "no event names blocks of full attention"
    assert followed.stream.number is None
    await engine.publish(stored(0, [11], kv_cache_spec_kind="full_attention", group_idx=1))
    await followed.holds(KEYS[0])


async def test_blocks_are_unknown_while_no_replay_is_answered(
    followed: Followed, engine: EventPublisher, logged: Logged
) -> None:
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])
    engine.silent = True
    await followed.knows_nothing()
    await engine.publish(stored(1, [12], parent=11))
    engine.silent = False
    await followed.holds(*KEYS[:2])
    assert [line["msg"] for line in logged.lines()][:2] == [UNKNOWN, KNOWN]


@pytest.mark.usefixtures("impatient")
async def test_pushes_are_applied_only_after_an_answer_tells_of_which_process_they_are(
    followed: Followed, engine: EventPublisher
) -> None:
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])
    engine.silent = True
    await followed.knows_nothing()
    await engine.stop()
    await engine.start()
    replays = engine.replays
    await until(lambda: engine.replays > replays + 1)  # connected to the new process
    await engine.publish(stored(0, [21]))
    await engine.publish(stored(1, [22], parent=21))  # has the number that follows the known batch
    replays = engine.replays
    await until(lambda: engine.replays > replays + 1)
    engine.silent = False
    await followed.holds(*KEYS[:2])


async def test_malformed_frames_are_skipped(followed: Followed, engine: EventPublisher) -> None:
    await followed.holds()
    for frames in ((b"",), (b"", b"number", b"x"), (b"a", b"b", b"c", b"d")):
        await engine._pushes.send_multipart(frames)
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])


async def test_long_replay_is_complete_and_yields_to_other_tasks(
    engine: EventPublisher, monkeypatch: pytest.MonkeyPatch
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
    async with started(turns()), following(engine) as followed:
        await followed.holds()
        for number in range(5_000):
            tokens = {"token_ids": [number] * 16}
            await engine.publish(stored(0, [number]) | tokens, pushed=False)
        await followed.until(lambda: len(followed.held) == 5_000)
    assert most <= 2


@pytest.mark.usefixtures("impatient")
async def test_oversized_batch_is_refused(
    followed: Followed, engine: EventPublisher, logged: Logged
) -> None:
    await followed.holds()
    engine.replayable.append((bytes(8), bytes(2**26 + 1)))
    await engine._pushes.send_multipart((b"kv@pod", *engine.replayable[-1]))
    line = await logged.line(UNKNOWN)
    assert "does not answer" in str(line["error"])
    engine.replayable.clear()
    await engine.publish(stored(0, [11]))
    await followed.holds(KEYS[0])


async def test_malformed_batch_number_is_skipped(engine: EventPublisher, logged: Logged) -> None:
    engine.replayable.append(((2**70).to_bytes(9, "big"), as_maps([])))
    async with following(engine) as followed:
        await logged.line(UNKNOWN)
        replays = engine.replays
        await followed.until(lambda: engine.replays > replays + 2)
        engine.replayable.clear()
        await engine.publish(stored(0, [11]))
        await followed.holds(KEYS[0])


async def test_unexpected_error_is_logged_once_and_the_stream_continues(
    engine: EventPublisher,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    followed: Followed,
) -> None:
    caplog.set_level("INFO")
    failures: asyncio.Queue[None] = asyncio.Queue()

    def fail(*_: object) -> None:
        failures.put_nowait(None)
        raise RuntimeError("odd")

    await followed.holds()
    with monkeypatch.context() as broken:
        broken.setattr(KvBlocks, "apply", fail)
        await engine.publish(stored(0, [11]))
        for _ in range(3):
            await asyncio.wait_for(failures.get(), PATIENCE_S)
        assert followed.stream.number is None
    await followed.holds(KEYS[0])
    assert [line.getMessage() for line in caplog.records] == [UNKNOWN, KNOWN]
    assert vars(caplog.records[0])["error"] == "RuntimeError: odd"


async def test_poller_has_two_sockets_for_each_of_a_thousand_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: asyncio.Queue[PollContext] = asyncio.Queue()

    class Polled(PolledReplica):
        def __init__(self, target: Target, known: ReplicaState | None, context: PollContext):
            super().__init__(target, known, context)
            made.put_nowait(context)

    monkeypatch.setattr("extproc.poll.poller.PolledReplica", Polled)
    settings = Config.model_validate({"replicas": ["127.0.0.1:9"]})
    async with started(poller_of(settings).run()), asyncio.timeout(PATIENCE_S):
        assert (await made.get()).zmq.get(zmq.MAX_SOCKETS) > 2 * 1000


async def test_skipped_save_is_repeated_by_the_next_checks(engine: EventPublisher) -> None:
    await engine.publish(stored(0, [11]))
    async with following(engine) as followed:
        followed.skips = 2
        await followed.until(lambda: followed.saves == 1)
    assert followed.skips == 0

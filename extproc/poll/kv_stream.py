"""The stream of one replica's KV events: numbered batches over ZeroMQ, and a replay of the last."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import zmq
import zmq.asyncio

from extproc.ground.address import join_address, split_address
from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.poll.destination import Destination
from extproc.poll.discovery import Target
from extproc.poll.kv_blocks import KvBlocks, Mark
from extproc.poll.kv_events import read_batch

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two checks for missing batches, which silence does not show. vLLM answers within
half a millisecond."""
_ANSWER_S = 2.0  # seconds for each part of a replay; vLLM takes 0.1 s at most, unless it is busy
SAVE_S = 30.0
"""Seconds between two saves for another poller: the replica has to keep the events of that time,
and vLLM keeps those of 10,000 steps."""
_SAVE_AGAIN_S = 900.0
"""Seconds between two saves where nothing changed: Redis drops a save after a while."""
_LARGEST_MESSAGE = 64 * 2**20  # bytes; the batch of a large step has a megabyte
_MOST_WAITING = 1_000  # pushed batches that may wait here; those beyond are dropped and replayed
_LONGEST_REASON = 200
_UNBOUNDED = 0
_NUMBER_BYTES = 8


class KvStream:
    """Brings the events of one replica into its blocks, and tells ``into`` when they may have
    changed.

    The replica pushes batches at the first of ``ports``. At the second one it replays all from the
    last applied batch on: a gap, and another process, show there. Batches that the replica has
    dropped by then are lost, and its blocks stay unknown until it starts anew or clears its cache.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        target: Target,
        ports: tuple[int, int],
        blocks: KvBlocks,
        into: Destination,
        clock: Clock,
    ) -> None:
        self._context = context
        host, _ = split_address(target.id)
        self._pushes, self._asked = (f"tcp://{join_address(host, port)}" for port in ports)
        self._ipv6 = ":" in host
        self._blocks = blocks
        self._into = into
        self._replica = target.id
        self._clock = clock
        self._last: Mark | None = None  # ``_NOTHING``: the replica sent none yet; None: not checked
        self._saved: Mark | None = None
        self._saved_at = -math.inf
        self._known = False  # the last check found the blocks known
        begins = "replica's KV events do not tell its blocks"
        over = "replica's KV events tell its blocks again"
        self._trouble = OutageLog(log, begins, over, replica=target.who)
        self._flaw = ""  # why the blocks are unknown until the replica starts anew

    @property
    def number(self) -> int | None:
        """Number of the last update of its blocks; None: they are not known."""
        return self._blocks.number if self._known and self._blocks.complete else None

    def tell_again(self) -> None:
        """Tells all blocks again, within a second, and saves them."""
        self._blocks.repeat()
        self._saved_at = -math.inf

    def doubt(self) -> None:
        """Takes the blocks for unknown until the next check: another process may have taken the
        replica's place, and be scraped before."""
        self._known = False

    async def run(self) -> NoReturn:
        self._last = self._blocks.restore(await self._into.load(self._replica))
        while True:
            try:
                with self._socket(zmq.SUB, self._pushes, _MOST_WAITING) as pushed:
                    pushed.subscribe(b"")
                    while True:
                        await self._check()
                        await self._save()
                        await self._follow(pushed, self._clock() + CHECK_S)
            except zmq.ZMQError as error:  # no file left to open, say
                self._note(f"{error}")
            except Exception as error:  # the other replicas go on
                self._last = None
                self._give_up(f"{type(error).__name__}: {error}"[:_LONGEST_REASON])
                self._note(self._flaw, error)
            await asyncio.sleep(CHECK_S)

    async def _follow(self, pushed: zmq.asyncio.Socket, until: float) -> None:
        """Applies pushed batches up to that time, or to a gap."""
        while (left := until - self._clock()) > 0:
            if await pushed.poll(math.ceil(left * 1000)):
                whole = self._take(_Batch.of(await pushed.recv_multipart()))
                await self._changed()
                if not whole:
                    return

    async def _check(self) -> None:
        try:
            while not await self._catch_up():
                pass
        except zmq.Again:
            self._note(f"{self._asked} does not answer")
        else:
            self._note("" if self._blocks.complete else self._flaw)
        await self._changed()

    async def _save(self) -> None:
        since = self._clock() - self._saved_at
        due = since > (_SAVE_AGAIN_S if self._last == self._saved else SAVE_S)
        if due and self._last is not None and self.number is not None:
            self._saved, self._saved_at = self._last, self._clock()
            await self._into.save(self._replica, partial(self._blocks.dump, self._last))

    async def _changed(self) -> None:
        await self._into.changed(self._replica, self._blocks)

    async def _catch_up(self) -> bool:
        """Replays from the last batch on, or starts anew where the replica has another one.

        Returns: whether nothing is missing.

        Raises:
            zmq.Again: no answer came in time.
        """
        last = self._last or _NOTHING
        async with aclosing(self._replayed(max(last.number, 0))) as batches:
            first = await anext(batches)
            if last != _NOTHING and first.mark != last:
                self._last = None
                self._blocks.start(complete=False)
                return False
            if last == _NOTHING:
                self._begin(first)
            began, newest, whole = self._last, first, True
            async for batch in batches:  # of a burst of many some are lost
                whole &= self._take(batch)
                newest = max(newest, batch)
        if whole or self._last != began:
            return whole
        self._last = newest.mark
        self._give_up("a batch of its events is lost")
        return True

    def _begin(self, first: "_Batch") -> None:
        """The oldest batch that the replica keeps, or nothing."""
        if first.number > 0:
            self._give_up("its oldest events are lost: have it keep more (buffer_steps)")
        elif self._last is None:
            self._blocks.start(complete=True)
        self._apply(first)

    def _take(self, batch: "_Batch") -> bool:
        """Applies the batch if it is the next one; returns whether none before it is missing."""
        if self._last is None:
            return False
        following = self._last.number + 1
        if batch.number == following:
            self._apply(batch)
        return batch.number <= following

    def _apply(self, batch: "_Batch") -> None:
        self._last = batch.mark
        try:
            for event in read_batch(batch.content) if batch.number >= 0 else ():
                self._blocks.apply(event)
        except (OverflowError, ValueError) as error:
            self._give_up(f"its events are not understood: {error}"[:_LONGEST_REASON])

    def _give_up(self, flaw: str) -> None:
        self._flaw = flaw
        self._blocks.start(complete=False)

    async def _replayed(self, first: int) -> AsyncGenerator["_Batch"]:
        """Yields the batches from number ``first`` on that the replica still has, then the end."""
        with self._socket(zmq.DEALER, self._asked, _UNBOUNDED) as asked:
            asked.rcvtimeo = round(_ANSWER_S * 1000)
            await asked.send_multipart((b"", first.to_bytes(_NUMBER_BYTES, "big")))
            while (batch := _Batch.of(await asked.recv_multipart())).number >= 0:
                yield batch
                await asyncio.sleep(0)  # what is there already is had without a turn for others
            yield batch

    def _socket(self, kind: int, address: str, most: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger, socket.rcvhwm, socket.ipv6 = 0, most, self._ipv6
        socket.maxmsgsize = _LARGEST_MESSAGE
        socket.connect(address)
        return socket

    def _note(self, problem: str, error: Exception | None = None) -> None:
        self._known = not problem
        if problem:
            self._trouble.failed(problem, error)
        else:
            self._trouble.recovered()


class _Batch(NamedTuple):
    """A numbered batch of events; a negative number ends a replay."""

    number: int
    content: bytes

    @property
    def mark(self) -> Mark:
        """Tells the batch from every other one, of other processes too."""
        return Mark(self.number, blake2b(self.content, digest_size=16).digest())

    @classmethod
    def of(cls, frames: list[bytes]) -> "_Batch":
        """Reads the last two frames; a topic may come before them."""
        number, content = frames[-2:] if len(frames) > 1 else _GARBAGE
        if len(number) != _NUMBER_BYTES:
            number, content = _GARBAGE
        return cls(int.from_bytes(number, "big", signed=True), content)


_NOTHING = _Batch(-1, b"").mark
_GARBAGE = b"", b""

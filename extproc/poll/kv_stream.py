"""Stream of one replica's KV events over ZeroMQ: numbered batches, and a replay of recent ones."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import zmq
import zmq.asyncio

from extproc.ground.address import join_address, split_address
from extproc.ground.clock import monotonic
from extproc.ground.outage_log import OutageLog
from extproc.poll.destination import Destination
from extproc.poll.discovery import Target
from extproc.poll.kv_blocks import KvBlocks, Mark
from extproc.poll.kv_events import read_batch

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two replays, which find a lost batch even if no later batch shows the gap. vLLM
answers a replay within half a millisecond."""
_ANSWER_S = 2.0  # seconds to wait for each part of a replay; an idle vLLM takes up to 0.1 s
SAVE_S = 30.0
"""Seconds between two saves of the blocks. The replica's next poller restores the last save and
requests a replay of later batches; vLLM can replay 10,000 steps."""
_SAVE_AGAIN_S = 900.0  # seconds between two saves without a change: Redis drops old saves
_LARGEST_MESSAGE = 64 * 2**20  # bytes; the batch of a large step has a megabyte
_MOST_PENDING = 1_000  # batches in the receive queue; a replay repeats batches that ZeroMQ drops
_LONGEST_REASON = 200
_NONE_FULL = "no event names blocks of full attention"
_UNBOUNDED = 0
_NUMBER_BYTES = 8


class KvStream:
    """Applies the events of one replica to ``blocks``, and reports changes to ``into``.

    The replica pushes batches at the first of its ports, and replays recent batches at the second.
    Every :data:`CHECK_S`, a check requests a replay from the last applied batch on, which reveals
    missing batches and a restart of the replica. If the replica cannot replay a missing batch, its
    blocks stay unknown until the replica restarts or clears its cache.
    """

    def __init__(
        self, context: zmq.asyncio.Context, target: Target, blocks: KvBlocks, into: Destination
    ) -> None:
        self._context = context
        host, _ = split_address(target.id)
        urls = [f"tcp://{join_address(host, port)}" for port in target.kv_events_ports or ()]
        self._push_url, self._replay_url = urls or ("", "")  # empty: no ports
        self._ipv6 = ":" in host
        self._blocks = blocks
        self._into = into
        self._replica = target.id
        self._last = _BEFORE_ALL  # last batch whose events were applied
        self._saved: Mark | None = None
        self._saved_at = -math.inf
        self._is_checked = False  # the last check found no batch missing
        self._outage = OutageLog(
            log,
            "replica's KV blocks are unknown: routers estimate its prefix cache",
            "replica's KV blocks are known again",
            replica=target.title,
        )
        self._loss = ""  # why the blocks are unknown until the replica restarts or clears its cache

    @property
    def number(self) -> int | None:
        """Number of the last update of the blocks, or None if the blocks are unknown."""
        return self._blocks.number if self._is_checked and self._blocks.complete else None

    def resend_all(self) -> None:
        """Schedules a whole update and a save of all blocks, because Redis may have lost both."""
        self._blocks.resend_all()
        self._saved_at = -math.inf

    def invalidate(self) -> None:
        """Marks the blocks unknown until the next check: the replica may have restarted."""
        self._is_checked = False

    async def run(self) -> None:
        """Follows the events until cancelled; returns at once if the replica has no ports."""
        if not self._push_url:
            return
        saved = await self._into.load_blocks(self._replica)
        self._last = self._blocks.restore(saved) or _BEFORE_ALL
        while True:
            try:
                with self._socket(zmq.SUB, self._push_url, _MOST_PENDING) as pushed:
                    pushed.subscribe(b"")
                    while True:
                        await self._check()
                        await self._save()
                        await self._follow(pushed, monotonic() + CHECK_S)
            except zmq.Again:  # pushed batches may be of another process, so they are dropped
                self._note(f"{self._replay_url} does not answer")
            except zmq.ZMQError as error:  # for instance, too many open files
                self._note(f"{error}")
            except Exception as error:  # must not end the polls of other replicas
                self._last = _BEFORE_ALL
                self._give_up(f"{type(error).__name__}: {error}"[:_LONGEST_REASON])
                self._note(self._loss, error)
            await asyncio.sleep(CHECK_S)

    async def _follow(self, pushed: zmq.asyncio.Socket, until: float) -> None:
        """Applies pushed batches until the time ``until``, or until a batch is missing."""
        while (left := until - monotonic()) > 0:
            if await pushed.poll(math.ceil(left * 1000)):
                is_next = self._receive(_Batch.of(await pushed.recv_multipart()))
                await self._into.blocks_changed(self._replica, self._blocks)
                if not is_next:
                    return

    async def _check(self) -> None:
        while not await self._catch_up():
            pass
        problem = _NONE_FULL if self._blocks.lacks_full_attention else ""
        self._note(problem if self._blocks.complete else self._loss)
        await self._into.blocks_changed(self._replica, self._blocks)

    async def _save(self) -> None:
        since = monotonic() - self._saved_at
        due = since > (_SAVE_AGAIN_S if self._last == self._saved else SAVE_S)
        if due and self.number is not None:
            dump = partial(self._blocks.dump, self._last)
            if await self._into.save_blocks(self._replica, dump):
                self._saved, self._saved_at = self._last, monotonic()

    async def _catch_up(self) -> bool:
        """Applies a replay from the last applied batch on; returns False if the caller has to call
        again. Raises zmq.Again without an answer within ``_ANSWER_S``."""
        last = self._last
        async with aclosing(self._replayed(max(last.number, 0))) as batches:
            first = await anext(batches)
            if last != _BEFORE_ALL and first.mark != last:  # another process
                self._last = _BEFORE_ALL
                self._blocks.reset(complete=False)
                return False
            if last == _BEFORE_ALL:
                self._begin(first)
            began, newest, whole = self._last, first, True
            async for batch in batches:  # ZeroMQ may drop some of a long burst
                whole &= self._receive(batch)
                newest = max(newest, batch)
        if whole or self._last != began:
            return whole
        self._last = newest.mark
        self._give_up("a batch of its events is lost")
        return True

    def _begin(self, first: "_Batch") -> None:
        """Starts anew from the first message of a replay: its oldest batch, or its end."""
        if first.number > 0:
            self._give_up("its oldest events are lost: raise buffer_steps of its KV events")
        elif not self._blocks.complete:
            self._blocks.reset(complete=True)
        self._apply(first)

    def _receive(self, batch: "_Batch") -> bool:
        """Applies the batch if it is the next; returns False if an earlier batch is missing."""
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
            self._give_up(f"its events are malformed: {error}"[:_LONGEST_REASON])

    def _give_up(self, loss: str) -> None:
        self._loss = loss
        self._blocks.reset(complete=False)

    async def _replayed(self, first: int) -> AsyncGenerator["_Batch"]:
        """Yields the batches that the replica still has from number ``first`` on, then the end."""
        with self._socket(zmq.DEALER, self._replay_url, _UNBOUNDED) as socket:
            socket.rcvtimeo = round(_ANSWER_S * 1000)
            await socket.send_multipart((b"", first.to_bytes(_NUMBER_BYTES, "big")))
            while (batch := _Batch.of(await socket.recv_multipart())).number >= 0:
                yield batch
                await asyncio.sleep(0)  # receiving a queued message does not yield to the loop
            yield batch

    def _socket(self, kind: int, url: str, most: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger, socket.rcvhwm, socket.ipv6 = 0, most, self._ipv6
        socket.maxmsgsize = _LARGEST_MESSAGE
        socket.connect(url)
        return socket

    def _note(self, problem: str, error: Exception | None = None) -> None:
        self._is_checked = not problem
        self._outage.note(problem, error)


class _Batch(NamedTuple):
    """Numbered batch of events. A negative number marks the end of a replay."""

    number: int
    content: bytes

    @property
    def mark(self) -> Mark:
        """Identity of the batch; batches of different processes never have the same mark."""
        return Mark(self.number, blake2b(self.content, digest_size=16).digest())

    @classmethod
    def of(cls, frames: list[bytes]) -> "_Batch":
        """Reads a message from its last two frames; a topic may precede these."""
        is_batch = len(frames) > 1 and len(frames[-2]) == _NUMBER_BYTES
        number, content = frames[-2:] if is_batch else _GARBAGE
        return cls(int.from_bytes(number, "big", signed=True), content)


_BEFORE_ALL = _Batch(-1, b"").mark
_GARBAGE = b"", b""

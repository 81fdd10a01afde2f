"""Writes the record of a router's traffic, once a second in a thread.

Python's RotatingFileHandler does not fit: at shutdown it would wait for a disk that hangs, it
cannot begin each file with the known replicas, and it does not count requests that could not be
written.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

from msgspec import structs
from msgspec.json import encode

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.address import split_address
from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import in_daemon_thread, in_turns
from extproc.observe.decision import RequestOutcome
from extproc.observe.record import (
    FORMAT,
    OF_PROFILE,
    Line,
    LostLine,
    RefusedLine,
    ReplicaLine,
    RequestLine,
    StartLine,
    text_of,
    upper,
)
from extproc.predict.inputs import FleetView
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState
from extproc.request.prefix import seed_of
from extproc.request.profile import RequestProfile

logger = logging.getLogger(__name__)

_SUFFIXES = "", ".1", ".2", ".3"  # of the names of a record's files, the newest first
_EVERY_S = 1.0
_LAST_S = 5.0  # limit for writing the last lines when the router stops
_REPLICAS_S = 10.0  # between two lines of a replica whose health and draining did not change
_MOST_PENDING = 64_000_000  # bytes of lines that wait for a slow disk; further lines are lost
_REPLAYED = {  # settings that a replay needs
    "route": {"policy", "session_cost_s", "models"},
    "hold": {"longest_s", "most"},
    "serve": {"chunks_per_s"},
    "poll": {"interval_s"},
}
_REQUEST = b'{"kind":"request"'  # beginning of a request's line
_NOT_WRITTEN = (
    "record of traffic is not written: free disk space, or set record.path to a folder that the "
    "router can write to"
)
_WRITTEN = "record of traffic is written again"


class Recorder:
    """Record of a pool's traffic. Adding a line takes microseconds and never waits for the disk."""

    def __init__(
        self, config: Config, folder: Path, fleet: Fleet, clock: Clock, wall: Clock
    ) -> None:
        """Make the record's folder; raises OSError if that fails."""
        self._config = config
        self._fleet = fleet
        self._clock = clock
        self._wall = wall
        _, port = split_address(config.serve.listen)
        self._files = [folder / f"{config.pool}-{port}{each}.jsonl" for each in _SUFFIXES]
        self._most = config.record.max_bytes // len(self._files)  # bytes of a file
        self._lines: list[bytes] = []
        self._pending = 0  # bytes of these lines and of the lines being written
        self._lost = 0  # requests whose line was dropped since the last write
        self._missing = 0  # requests in no file, until a LostLine counts them
        self._since = wall()  # start of the time that the pending lines cover
        # By replica: last line (repeated when a file begins), time of the line, serves, draining.
        self._replicas: dict[str, tuple[bytes, float, bool, bool]] = {}
        self._lock = Lock()
        self._begun = False  # the last write succeeded, so the newest file has its first lines
        self._outage = OutageLog(logger, _NOT_WRITTEN, _WRITTEN, logging.ERROR, folder=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot make folder {folder} (record.path): {error.strerror}") from None

    def ended(
        self,
        profile: RequestProfile,
        outcome: RequestOutcome,
        replica: str,
        seconds: float,
        counted: float,
        failed: bool = False,
        cut: bool = False,
    ) -> None:
        """Record a request that ended on a replica.

        Args:
            seconds: time since dispatch.
            counted: output tokens of each sequence, estimated from the replica's steps.
            failed: the replica gave no answer, or an error, or works on in the background.
            cut: the router read the response, which broke off.
        """
        reported = outcome.output_tokens
        each = counted if reported is None else reported / max(profile.sequences, 1)
        request = RequestLine(
            at=round(self._wall() - seconds - outcome.queued_s, 6),
            replica=replica,
            seconds=round(seconds, 6),
            queued_s=round(outcome.queued_s, 6),
            ttft_s=None if outcome.ttft_s is None else round(outcome.ttft_s, 6),
            complete=outcome.completion_s is not None,
            failed=failed,
            cut=cut,
            prompt_tokens=outcome.prompt_tokens or profile.prompt_tokens,
            output_tokens=round(each, 1),
            **_fields_of(profile),
        )
        self._add(request)

    def refused(self, why: str, profile: RequestProfile | None, since_arrival_s: float) -> None:
        """Record a request that no replica got.

        Args:
            why: the reason in a word.
            profile: profile of the request, or None if its body could not be read.
            since_arrival_s: time since the request arrived.
        """
        at = round(self._wall() - since_arrival_s, 6)
        if profile is None:
            self._add(RefusedLine(at=at, why=why))
            return
        fields = _fields_of(profile) | {"prompt_tokens": profile.prompt_tokens}
        self._add(RequestLine(at=at, replica="", seconds=0.0, refused=why, **fields))

    async def run(self) -> None:
        try:
            while True:
                await in_turns(self._look())  # requests come first
                await self._flush()
                await asyncio.sleep(_EVERY_S)
        finally:
            deque(self._look(), maxlen=0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._flush(), _LAST_S)

    def _add(self, line: Line) -> bytes:
        text = encode(line) + b"\n"
        if self._pending < _MOST_PENDING:
            self._lines.append(text)
            self._pending += len(text)
        else:
            self._lost += isinstance(line, RequestLine)
        return text

    async def _flush(self) -> None:
        """Write the pending lines in a daemon thread, so that a hanging disk does not delay the
        stop of the router."""
        if self._lost:
            logger.error(
                "record of traffic is incomplete: the disk is too slow to write every request",
                extra={"requests_lost": self._lost},
            )
        lines, self._lines, lost, self._lost = self._lines, [], self._lost, 0
        since, self._since = self._since, self._wall()
        await in_daemon_thread(partial(self._write, lines, since, lost))
        self._pending -= sum(map(len, lines))

    def _look(self) -> Iterator[None]:
        """Record replicas that changed, or whose last line is 10 s old; yield after each line."""
        now, view = self._clock(), self._fleet.overview()
        for place, replica in enumerate(view.ids):
            state = self._fleet.members.get(replica)
            if state is None:
                continue
            _, at, *condition = self._replicas.get(replica, (b"", -inf))
            if now - at >= _REPLICAS_S or condition != [state.serves, state.draining]:
                line = self._add(_line_of(self._wall(), state, view, place))
                self._replicas[replica] = line, now, state.serves, state.draining
                yield
        for replica in self._replicas.keys() - set(view.ids):
            del self._replicas[replica]
            self._add(ReplicaLine(at=self._wall(), id=replica))

    def _write(self, lines: list[bytes], since: float, lost: int) -> None:
        """Append lines to the newest file. If that is full, or somebody moved it away, begin a new
        file, which can be read without older files. ``lost``: requests dropped since the last
        write, made at ``since``."""
        with self._lock:
            self._missing += lost
            if self._missing:
                lines = [encode(LostLine(at=since, requests=self._missing)) + b"\n", *lines]
            text, newest = b"".join(lines), self._files[0]
            try:
                size = newest.stat().st_size if newest.exists() else 0
                full = size + len(text) > self._most
                if full or not (size and self._begun):
                    if full:
                        self._rotate()
                    newest.parent.mkdir(parents=True, exist_ok=True)
                    known = [line for line, *_ in self._replicas.copy().values()]
                    text = b"".join([b"\n", self._start(since), *known, text])
                newest.touch(0o600)
                with newest.open("ab") as file:
                    file.write(text)
                self._begun = True
                self._missing = 0
                self._outage.recovered()
            except OSError as error:
                self._missing += sum(line.startswith(_REQUEST) for line in lines)
                self._outage.failed(error.strerror)
                self._begun = False

    def _rotate(self) -> None:
        for older, file in pairwise(reversed(self._files)):
            if file.exists():
                file.replace(older)

    def _start(self, at: float) -> bytes:
        config = self._config.model_dump(mode="json", include=_REPLAYED)
        start = StartLine(at=at, format=FORMAT, pool=self._config.pool, config=config)
        return encode(start) + b"\n"


def _fields_of(profile: RequestProfile) -> dict[str, Any]:
    prefix, objective = profile.prefix, profile.objective
    return {name: getattr(profile, name) for name in OF_PROFILE} | {
        "estimated_tokens": profile.prompt_tokens,
        "tenant": f"{seed_of(profile.tenant):x}" if profile.tenant else "",
        "objective": objective.name,
        "priority": objective.priority,
        "ttft_target_s": objective.ttft_s,
        "tpot_target_s": objective.tpot_s,
        "completion_target_s": objective.completion_s,
        "keys": text_of(prefix.keys),
        "unit": prefix.unit,
        "whole": upper(prefix.whole),
        "previous_key": upper(prefix.previous_key),
        "previous_tokens": prefix.previous_tokens,
    }


def _line_of(now: float, state: ReplicaState, view: FleetView, place: int) -> ReplicaLine:
    costs = view.c0, view.c_prefill, view.c_batch, view.c_kv
    step = StepModel(*(cost.item(place) for cost in costs))
    recorded = structs.replace(state, learned=step, scrape_seconds=0.0, life_s=0.0, kv_update=None)
    limits = view.token_budget, view.max_num_seqs, view.tokens_per_step
    return ReplicaLine(now, state.id, recorded, *(limit.item(place) for limit in limits))

"""Writes the record of a router's traffic, every second in a thread.

RotatingFileHandler does not fit: it joins logging's shutdown, which would wait for a disk that
hangs, and it neither begins a file with the known replicas nor counts requests not written.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock

from msgspec import structs
from msgspec.json import Encoder

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.tables import COSTS
from extproc.ground.address import split_address
from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import in_daemon_thread
from extproc.observe.decision import Outcome
from extproc.observe.record import (
    FORMAT,
    Line,
    Lost,
    Refused,
    Replica,
    Request,
    Start,
    text_of,
    upper,
)
from extproc.predict.inputs import FleetView
from extproc.replica_state import ReplicaState
from extproc.request.prefix import seed_of
from extproc.request.profile import RequestProfile

logger = logging.getLogger(__name__)

FILES = 4  # the newest and those before; together they have the bytes that are configured
_EVERY_S = 1.0
_LAST_S = 5.0  # seconds that the last lines may take at the end of a router
_REPLICAS_S = 10.0  # seconds between two lines of a replica of which nothing changed but its speed
_MOST_KEPT = 64_000_000  # bytes of lines that wait for a slow disk; further lines are lost
_DECIDES = {  # settings that a replay needs
    "route": {"policy", "session_cost_s", "models"},
    "hold": {"longest_s", "most"},
    "serve": {"chunks_per_s"},
    "poll": {"interval_s"},
}
_REQUEST = b'{"kind":"request"'  # beginning of a request's line
_NOT_WRITTEN = (
    "the record is not written: make room, or set record.path to a folder that the router may "
    "write to"
)
_LEFT_OUT = {"output_lengths", "scrape_seconds", "life_s", "kv_news"}
_USUAL = {  # fields of a replica's state in a record, each with the value that is left out
    one.name: one.default for one in structs.fields(ReplicaState) if one.name not in _LEFT_OUT
}


class Recorder:
    """Record of one pool; adding a line takes microseconds and never waits for the disk."""

    def __init__(
        self, config: Config, folder: Path, fleet: Fleet, clock: Clock, wall: Clock
    ) -> None:
        """Make the folder; raises OSError."""
        self._config = config
        self._fleet = fleet
        self._clock = clock
        self._wall = wall
        self._most = config.record.max_bytes // FILES
        _, port = split_address(config.serve.listen)
        self._name = f"{config.pool}-{port}"
        self._folder = folder
        self._encode = Encoder().encode
        self._lines: list[bytes] = []
        self._kept = 0  # bytes of these, and of those that are just written
        self._lost = 0  # requests whose line was dropped since the last write
        self._missing = 0  # requests in no file, until a line counts them
        self._since = wall()  # begin of the time that the kept lines cover
        # By replica: its last line, with which a file begins, its time, healthy, draining.
        self._replicas: dict[str, tuple[bytes, float, bool, bool]] = {}
        self._lock = Lock()
        self._size = -1  # of the newest file; below zero: its beginning is not written yet
        self._trouble = OutageLog(logger, _NOT_WRITTEN, level=logging.ERROR, folder=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot make {folder} (record.path): {error.strerror}") from None

    def ended(
        self,
        profile: RequestProfile,
        outcome: Outcome,
        replica: str,
        seconds: float,
        counted: float,
        failed: bool = False,
        cut: bool = False,
    ) -> None:
        """Record a request that ended on a replica.

        Args:
            seconds: since it was sent.
            counted: tokens of each sequence, by the replica's steps.
            failed: no answer, or an error.
            cut: the answer was read and did not end.
        """
        prefix, aim, reported = profile.prefix, profile.objective, outcome.output_tokens
        each = counted if reported is None else reported / max(profile.sequences, 1)
        request = Request(
            at=round(self._wall() - seconds - outcome.waited_s, 6),
            endpoint=str(profile.endpoint),
            model=profile.model,
            replica=replica,
            seconds=round(seconds, 6),
            waited_s=round(outcome.waited_s, 6),
            ttft_s=None if outcome.ttft_s is None else round(outcome.ttft_s, 6),
            complete=outcome.completion_s is not None,
            failed=failed,
            cut=cut,
            prompt_tokens=outcome.prompt_tokens or profile.prompt_tokens,
            estimated_tokens=profile.prompt_tokens,
            output_tokens=round(each, 1),
            output_bound=profile.output_bound,
            least_output=profile.least_output,
            sequences=profile.sequences,
            prompts=profile.prompts,
            longest_share=profile.longest_share,
            stream=profile.stream,
            tenant=f"{seed_of(profile.tenant):x}" if profile.tenant else "",
            session=profile.session,
            objective=aim.name,
            priority=aim.priority,
            ttft_target_s=aim.ttft_s,
            tpot_target_s=aim.tpot_s,
            completion_target_s=aim.completion_s,
            keys=text_of(prefix.keys),
            unit=prefix.unit,
            whole=upper(prefix.whole),
            asked=upper(prefix.previous_key),
            answered=prefix.previous_tokens,
        )
        self._add(request)

    def refused(self, why: str) -> None:
        self._add(Refused(at=self._wall(), why=why))

    async def run(self) -> None:
        try:
            while True:
                for _ in self._look():
                    await asyncio.sleep(0)  # requests come first
                await self._written()
                await asyncio.sleep(_EVERY_S)
        finally:
            deque(self._look(), maxlen=0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._written(), _LAST_S)

    def _add(self, line: Line) -> bytes:
        text = self._encode(line) + b"\n"
        if self._kept < _MOST_KEPT:
            self._lines.append(text)
            self._kept += len(text)
        else:
            self._lost += isinstance(line, Request)
        return text

    async def _written(self) -> None:
        """Write in a daemon thread, so that a disk that hangs does not hold up the router's end."""
        if self._lost:
            logger.error("the disk is too slow for the record", extra={"requests_lost": self._lost})
        lines, self._lines, lost, self._lost = self._lines, [], self._lost, 0
        since, self._since = self._since, self._wall()
        await in_daemon_thread(partial(self._write, lines, since, lost))
        self._kept -= sum(map(len, lines))

    def _look(self) -> Iterator[None]:
        """Record the replicas that changed; yields after each."""
        now, view = self._clock(), self._fleet.overview()
        for place, replica in enumerate(view.ids):
            state = self._fleet.members.get(replica)
            if state is None:
                continue
            _, at, *condition = self._replicas.get(replica, (b"", -inf))
            if now - at >= _REPLICAS_S or condition != [state.healthy, state.draining]:
                line = self._add(_line_of(self._wall(), state, view, place))
                self._replicas[replica] = line, now, state.healthy, state.draining
                yield
        for replica in self._replicas.keys() - set(view.ids):
            del self._replicas[replica]
            self._add(Replica(at=self._wall(), id=replica))

    def _write(self, lines: list[bytes], since: float, lost: int) -> None:
        """Append to the newest file, or begin one that can be read without those before."""
        with self._lock:
            self._missing += lost
            if self._missing:
                lines = [self._encode(Lost(at=since, requests=self._missing)) + b"\n", *lines]
            text, newest = b"".join(lines), self._file(0)
            try:
                if self._size < 0 or self._size + len(text) > self._most:
                    self._rotate()
                    known = [line for line, *_ in self._replicas.copy().values()]
                    text = b"".join([b"\n", self._start(since), *known, text])
                newest.touch(0o600)
                with newest.open("ab") as file:
                    file.write(text)
                self._size = newest.stat().st_size
                self._missing = 0
                self._trouble.recovered()
            except OSError as error:
                self._missing += sum(line.startswith(_REQUEST) for line in lines)
                self._trouble.failed(error.strerror)
                self._size = -1

    def _rotate(self) -> None:
        newest = self._file(0)
        if not newest.exists() or (self._size < 0 and newest.stat().st_size < self._most):
            return  # the file of an earlier process or attempt has room
        for number in reversed(range(FILES - 1)):
            if (file := self._file(number)).exists():
                file.replace(self._file(number + 1))

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._name}{f'.{number}' if number else ''}.jsonl"

    def _start(self, at: float) -> bytes:
        config = self._config.model_dump(mode="json", include=_DECIDES)
        start = Start(at=at, format=FORMAT, pool=self._config.pool, config=config)
        return self._encode(start) + b"\n"


def _line_of(now: float, state: ReplicaState, view: FleetView, place: int) -> Replica:
    costs = {name: getattr(view, name).item(place) for name in COSTS}
    known = structs.asdict(state) | {"learned": costs}
    return Replica(
        at=now,
        id=state.id,
        state={name: known[name] for name, usual in _USUAL.items() if known[name] != usual},
        token_budget=view.token_budget.item(place),
        max_num_seqs=view.max_num_seqs.item(place),
        tokens_per_step=view.tokens_per_step.item(place),
    )

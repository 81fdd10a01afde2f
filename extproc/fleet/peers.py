"""Load of the other routers, the peers: their last digests, moved forward in time."""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from itertools import islice
from math import inf, nan

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from extproc.fleet.digest import (
    BACKLOG,
    DECODING,
    FIGURES,
    KV,
    PARTS,
    QUEUED_SEQUENCES,
    REMAINING,
    REQUESTS,
    WHOLE_EVERY_S,
    Digest,
    DigestKind,
)
from extproc.fleet.tables import Replicas
from extproc.ground.address import process_address
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats

STALE_S = 0.1  # age above which a digest does more harm than good, as simulations show
DEAD_S = 1.5
"""Time without a digest after which a peer counts as gone, if the router's own digests come back:
as long as three whole digests."""
_MOST_STOPPED = 100  # last farewells that are remembered

POLLED, POLLED_BEFORE, POLLED_KV = POLLED_ROWS = range(FIGURES, FIGURES + 3)
"""Rows of the load after a digest's figures: the peer's sequences at the last poll and at the poll
before, and its KV tokens at the last poll. NaN: the peer did not count then."""


class Peers:
    """Sums of the peers' load, in :attr:`Replicas.peers`.

    The load on a replica is ``own + Σ peers + external``, over the peers that count: those whose
    last digest is at most 0.1 s old, or 0.6 s if the peer has no requests. External load is the
    polled load that no router accounts for: ``max(0, polled − own − Σ peers)``, with the figures of
    each router at the poll. The requests of a peer that does not count are external.

    The age of a digest is the time since its arrival, plus the time that the router's own digests
    take to come back. So the clocks of two machines are never compared.
    """

    def __init__(
        self, own: str, replicas: Replicas, rows: Mapping[str, int], clock: Clock, wall: Clock
    ) -> None:
        """``own``: this router's name, as in its own digests. ``rows``: row of each replica."""
        self._own = own
        self._replicas = replicas
        self._rows = rows
        self._clock = clock
        self._wall = wall
        self._last: dict[str, Digest] = {}
        """Last digest of each peer, in the order of the arrays. A digest of changes gets what it
        lacks from the digest before: the rest of the queue, and the admin address."""
        self._totals: dict[str, dict[int, float]] = {}  # by peer: queued work of all replicas
        self._freed: dict[int, None] = {}  # rows in which the requests of a peer became fewer
        self._load = np.zeros((POLLED_ROWS.stop, 0, 0))  # figures, peers, replicas
        self._arrived_at = np.zeros(0)  # when the last digest arrived
        self._fresh_s = np.zeros(0)  # how long the last digest stays fresh
        self._counts = np.zeros(0)  # 1: the peer counts
        self.stopped = deque[str](maxlen=_MOST_STOPPED)  # the last peers that said farewell
        self._echo_s = 0.0  # seconds that the router's last digest took to come back
        self._echo_at = -inf  # when the router's last digest came back
        self._connected_at = -inf

    def __len__(self) -> int:
        return len(self._last)

    @property
    def addresses(self) -> Collection[str]:
        """Host and port of each peer; both stay the same when the peer restarts."""
        return sorted({process_address(name) for name in self._last})

    @property
    def admins(self) -> Mapping[str, str]:
        """Admin address of each peer, by host and port, as far as they are known."""
        last = self._last.items()
        return {process_address(name): digest.admin for name, digest in last if digest.admin}

    @property
    def digest_age(self) -> float | None:
        """Seconds since the newest digest of a peer was sent, or None without peers."""
        return self._clock() - self._arrived_at.max().item() + self._echo_s if len(self) else None

    @property
    def stale(self) -> bool:
        """True if there are peers and none counts."""
        return len(self) > 0 and not self._replicas.peers_count

    @property
    def all_count(self) -> bool:
        """True if every peer counts, or there are none."""
        return bool(self._counts.all())

    def queued(self, priority: int, most: float) -> float:
        """Replica-seconds of the requests of a priority in the queues of the peers that count; at
        most ``most`` for each peer."""
        totals = zip(self._totals.values(), self._counts.tolist(), strict=True)
        return sum(min(total.get(priority, 0.0), most) for total, counts in totals if counts)

    def queued_for(self, replica: str) -> list[tuple[Mapping[int, float], float]]:
        """For each peer that counts and has requests queued for the replica: the replica-seconds
        queued, by priority, and the peer's requests in flight there."""
        row = self._rows.get(replica)
        queued = [digest.queued.get(replica) for digest in self._last.values()]
        if row is None or not any(queued):
            return []
        peers = zip(queued, self._load[REQUESTS, :, row].tolist(), self._counts, strict=True)
        return [(work, on) for work, on, counts in peers if counts and work]

    def take_freed(self, most: int) -> Collection[int]:
        """Removes and returns at most ``most`` rows in which the requests of a peer have become
        fewer."""
        rows = [*islice(self._freed, most)]
        for row in rows:
            del self._freed[row]
        return rows

    # -- digests ----------------------------------------------------------------------------

    def receive(self, digest: Digest, age: float) -> bool:
        """Stores a digest that Redis received ``age`` seconds ago, unless a newer one came before.

        Call :meth:`Progress.advance` first. Returns True if the sums of the peers' load changed.
        """
        now, name, changed = self._clock(), digest.router, False
        if name == self._own:
            self._echo_s = max(self._wall() - age - digest.sent_at, 0.0)
            self._echo_at = now - age
        elif (last := self._last.get(name)) is None or digest.number > last.number:
            if last is None:
                self._join()
            elif digest.kind is DigestKind.CHANGES:
                digest = replace(digest, admin=last.admin, queued=last.queued | digest.queued)
            queued = {replica: work for replica, work in digest.queued.items() if work}
            self._last[name], self._totals[name] = replace(digest, queued=queued), _total(queued)
            place = list(self._last).index(name)
            self._arrived_at[place] = now - age
            changed = bool(digest.replicas) or digest.kind is not DigestKind.CHANGES
            if changed:
                self._take(place, digest)
            if digest.kind is DigestKind.FAREWELL:
                self.stopped.append(name)
                self._keep(np.arange(len(self)) != place)
        return self.refresh(now) or changed

    def connected(self) -> None:
        """Notes that Redis is back: peers, too, get ``DEAD_S`` from now to connect again."""
        self._connected_at = self._clock()

    def refresh(self, now: float) -> bool:
        """Determines which peers count, by the age of their last digest, and forgets dead peers.

        Returns True if the sums of the peers' load changed.
        """
        if not len(self):
            return False
        fresh = now - self._arrived_at + self._echo_s <= self._fresh_s
        changed = fresh != self._counts
        alive = self._echo_at - np.maximum(self._arrived_at, self._connected_at) <= DEAD_S
        if changed.any():
            self._attribute(fresh & changed, changed)
            self._counts = fresh.astype(float)
            self._add_up()
        if dead := not alive.all():
            self._keep(alive)
        return dead or bool(changed.any())

    def _attribute(self, to_peer: NDArray[np.bool_], changed: NDArray[np.bool_]) -> None:
        """Subtracts from the unattributed load the polled load of peers that count again
        (``to_peer``), and adds the polled load of the other ``changed`` peers, which count no more.

        If a peer did not count at a poll, its present load stands for its load at the poll.
        """
        replicas, load = self._replicas, self._load
        unknown = np.isnan(load[POLLED_ROWS]) & to_peer[:, None]
        load[POLLED_ROWS] = np.where(unknown, load[[PARTS, PARTS, KV]], load[POLLED_ROWS])
        polled = np.matmul(changed - 2.0 * to_peer, np.nan_to_num(load[POLLED_ROWS]))
        replicas.unattributed_figures[:] += np.where(replicas.sampled_at < inf, polled, 0.0)
        replicas.set_external()

    def polled(self, row: int, sequences: bool) -> None:
        """Stores the peers' KV tokens on a replica at the moment of a poll; with ``sequences`` (the
        poll was on time) also the peers' sequences, to compare them with the polled sequences."""
        if not len(self):
            return
        load = self._load[:, :, row]
        known = np.where(self._counts, load, nan)
        if sequences:
            load[POLLED_BEFORE], load[POLLED] = load[POLLED], known[PARTS]
        load[POLLED_KV] = known[KV]

    # -- the sums ---------------------------------------------------------------------------

    def move(self, part: Floats | float, tokens: Floats) -> None:
        """Moves the peers' load forward in time.

        Args:
            part: share of each replica's backlog that was prefilled.
            tokens: tokens that each decoding sequence of a replica got.
        """
        load = self._load
        if isinstance(part, np.ndarray):
            gone = load[: BACKLOG + 1] * part
            gone[REQUESTS] = 0.0
            load[: BACKLOG + 1] -= gone
            load[DECODING] += gone[QUEUED_SEQUENCES]
            load[KV] += gone[BACKLOG]
        made = load[DECODING] * tokens
        load[KV] += made
        load[REMAINING] = np.maximum(load[REMAINING] - made, 0.0)
        self._add_up()

    def clear(self, row: int) -> None:
        """Clears the peers' load in a row, because another replica gets the row."""
        missing = len(self._replicas) - self._load.shape[2]
        self._load = np.pad(self._load, ((0, 0), (0, 0), (0, missing)))
        self._load[:, :, row] = 0.0
        self._add_up()

    def _join(self) -> None:
        self._load = np.pad(self._load, ((0, 0), (0, 1), (0, 0)))
        self._load[POLLED_ROWS, -1] = nan
        self._arrived_at = np.append(self._arrived_at, 0.0)
        self._fresh_s = np.append(self._fresh_s, STALE_S + WHOLE_EVERY_S)
        self._counts = np.append(self._counts, 0.0)

    def _keep(self, peers: NDArray[np.bool_]) -> None:
        for name in [name for name, keep in zip(self._last, peers, strict=True) if not keep]:
            del self._last[name], self._totals[name]
        self._load = self._load.compress(peers, axis=1)
        self._arrived_at = self._arrived_at[peers]
        self._fresh_s = self._fresh_s[peers]
        self._counts = self._counts[peers]
        self._add_up()

    def _take(self, place: int, digest: Digest) -> None:
        """Replaces a peer's figures by those of its digest; ``place``: index of the peer."""
        replicas, load = self._replicas, self._load[:FIGURES, place]
        rows = np.array([self._rows.get(name, -1) for name in digest.replicas], dtype=np.intp)
        known = (rows >= 0).nonzero()[0]
        requests_before, backlog_before = load[[REQUESTS, BACKLOG]]
        if digest.kind is not DigestKind.CHANGES:
            load[:] = 0.0
        load[:, rows[known]] = digest.figures[:, known]
        self._fresh_s[place] = STALE_S if load[REQUESTS].any() else STALE_S + WHOLE_EVERY_S
        self._add_up()
        self._freed |= dict.fromkeys((load[REQUESTS] < requests_before).nonzero()[0].tolist())
        # Added prompts lengthen the step in progress.
        longer = (load[BACKLOG] > backlog_before + 1.0).nonzero()[0]
        backlog = replicas.enqueued[longer] - replicas.prefilled[longer]
        counts = self._counts.copy()
        counts[place] = 1.0  # the peer of this digest is about to count
        backlog += counts @ self._load[BACKLOG][:, longer]
        replicas.chunk[longer] = np.clip(backlog, 1.0, replicas.token_budget[longer])

    def _add_up(self) -> None:
        self._replicas.peers_count = bool(self._counts.any())
        self._replicas.peers = np.matmul(self._counts, self._load[:FIGURES])


def _total(queued: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Sums queued work over the replicas, by priority."""
    total = defaultdict[int, float](float)
    for work in queued.values():
        for priority, seconds in work.items():
            total[priority] += seconds
    return total

"""Load of the other routers, the peers: their digests, moved forward in between."""

from collections.abc import Mapping
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from extproc.fleet.digest import (
    BACKLOG,
    DECODING,
    FIGURES,
    JOINING,
    KV,
    PARTS,
    REMAINING,
    REQUESTS,
    WHOLE_EVERY_S,
    Digest,
    DigestKind,
)
from extproc.fleet.tables import Replicas
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats

STALE_S = 0.1  # seconds: in simulation, sharing later than this is worse than none
DEAD_S = 1.5  # seconds of silence after which a router is gone: three whole digests

SEEN, SEEN_BEFORE, SEEN_KV = ROWS = range(FIGURES, FIGURES + 3)
"""Rows of the load after a digest's figures: what of a peer the last poll saw (sequences), the poll
before (sequences), and the last poll (KV tokens); NaN where the peer did not count then."""


class Peers:
    """Sums of the peers' load, in the table of replicas.

    The load on a replica is ``own + Σ peers + external``, over the peers that count: those whose
    last digest is fresh, at most 0.1 s old, or 0.6 s from a peer without requests. External is what
    polls saw and nobody accounts for: ``max(0, polled − own − Σ peers)``, by what each had at the
    poll; and so the requests of a peer that is late are external meanwhile.

    The age of a digest is the time since it arrived, and what the router's own digests take to come
    back to it: clocks of two machines are never compared.
    """

    def __init__(
        self, own: str, replicas: Replicas, rows: Mapping[str, int], clock: Clock, wall: Clock
    ) -> None:
        """``own``: the router's name, to know its own digests by; ``rows``: by replica."""
        self._own = own
        self._replicas = replicas
        self._rows = rows
        self._clock = clock
        self._wall = wall
        self._numbers: dict[str, int] = {}  # by peer, in the arrays' order: of its last digest
        self._load = np.zeros((ROWS.stop, 0, 0))  # figures, peers, replicas
        self._heard_at = np.zeros(0)
        self._patience = np.zeros(0)  # seconds that the peer's last digest stays fresh
        self._counts = np.zeros(0)  # 1: the peer counts
        self._echo_s = 0.0  # seconds that the router's last digest took to come back
        self._connected_at = -inf  # infinite while nothing can be heard
        self.counted = False  # any peer counts

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def digest_age(self) -> float | None:
        """Seconds since the newest digest of a peer was sent; None where there are no peers."""
        return self._clock() - self._heard_at.max().item() + self._echo_s if len(self) else None

    @property
    def stale(self) -> bool:
        """True if there are peers and none counts."""
        return len(self) > 0 and not self.counted

    # -- what is heard ----------------------------------------------------------------------

    def receive(self, digest: Digest, age: float = 0.0) -> bool:
        """Takes in a digest that Redis got ``age`` seconds ago, unless it is older than the last.

        Progress must be up to date. Returns True if the sums changed.
        """
        now, name, changed = self._clock(), digest.router, False
        if name == self._own:
            self._echo_s = max(self._wall() - age - digest.sent_at, 0.0)
        elif digest.number > self._numbers.get(name, 0):
            if name not in self._numbers:
                self._join()
            self._numbers[name] = digest.number
            place = list(self._numbers).index(name)
            self._heard_at[place] = now - age
            changed = bool(digest.replicas) or digest.kind is not DigestKind.CHANGES
            if changed:
                self._take(place, digest)
            if digest.kind is DigestKind.FAREWELL:
                self._keep(np.arange(len(self)) != place)
        return self.refresh(now) or changed

    def cut_off(self) -> None:
        """Nothing can be heard until :meth:`connected`: nobody is taken for dead meanwhile."""
        self._connected_at = inf

    def connected(self) -> None:
        self._connected_at = self._clock()

    def refresh(self, now: float) -> bool:
        """Counts the peers that are fresh, and forgets the dead; returns True if the sums
        changed."""
        if not len(self):
            return False
        fresh = now - self._heard_at + self._echo_s <= self._patience
        changed = fresh != self._counts
        alive = now - np.maximum(self._heard_at, self._connected_at) <= DEAD_S
        if changed.any():
            self._attribute(fresh & changed, changed)
            self._counts = fresh.astype(float)
            self._add_up()
        if dead := not alive.all():
            self._keep(alive)
        return dead or bool(changed.any())

    def _attribute(self, to_peer: NDArray[np.bool_], changed: NDArray[np.bool_]) -> None:
        """Takes what polls saw of peers out of what nobody accounts for, or puts it back.

        A poll that came while a peer did not count saw what the peer's first digest then tells.
        """
        replicas, load = self._replicas, self._load
        unknown = np.isnan(load[ROWS]) & to_peer[:, None]
        load[ROWS] = np.where(unknown, load[[PARTS, PARTS, KV]], load[ROWS])
        seen = np.matmul(changed - 2.0 * to_peer, np.nan_to_num(load[ROWS]))
        replicas.unattributed_figures[:] += np.where(replicas.sampled_at < inf, seen, 0.0)
        replicas.set_external()

    def polled(self, row: int, sequences: bool) -> None:
        """A poll of the replica in that row saw the peers' load as of now: its KV tokens, and its
        ``sequences``, if the page came soon enough to tell."""
        if not len(self):
            return
        load = self._load[:, :, row]
        known = np.where(self._counts, load, nan)
        if sequences:
            load[SEEN_BEFORE], load[SEEN] = load[SEEN], known[PARTS]
        load[SEEN_KV] = known[KV]

    # -- the sums ---------------------------------------------------------------------------

    def move(self, part: Floats | float, tokens: Floats) -> None:
        """Moves the load forward: that part of each backlog is prefilled, and each sequence gets so
        many tokens."""
        load = self._load
        if isinstance(part, np.ndarray):
            gone = load[: BACKLOG + 1] * part
            gone[REQUESTS] = 0.0
            load[: BACKLOG + 1] -= gone
            load[DECODING] += gone[JOINING]
            load[KV] += gone[BACKLOG]
        made = load[DECODING] * tokens
        load[KV] += made
        load[REMAINING] = np.maximum(load[REMAINING] - made, 0.0)
        self._add_up()

    def clear(self, row: int) -> None:
        """Another replica is in that row."""
        missing = len(self._replicas) - self._load.shape[2]
        self._load = np.pad(self._load, ((0, 0), (0, 0), (0, missing)))
        self._load[:, :, row] = 0.0
        self._add_up()

    def _join(self) -> None:
        self._load = np.pad(self._load, ((0, 0), (0, 1), (0, 0)))
        self._load[ROWS, -1] = nan
        self._heard_at, self._patience, self._counts = (
            np.append(one, 0.0) for one in (self._heard_at, self._patience, self._counts)
        )

    def _keep(self, peers: NDArray[np.bool_]) -> None:
        names = zip(self._numbers.items(), peers.tolist(), strict=True)
        self._numbers = dict(one for one, keep in names if keep)
        self._load = self._load.compress(peers, axis=1)
        self._heard_at, self._patience, self._counts = (
            one[peers] for one in (self._heard_at, self._patience, self._counts)
        )
        self._add_up()

    def _take(self, place: int, digest: Digest) -> None:
        """Puts the digest's figures in place of those before, for the replicas it is about."""
        replicas, load = self._replicas, self._load[:FIGURES, place]
        rows = np.array([self._rows.get(name, -1) for name in digest.replicas], dtype=np.intp)
        known = (rows >= 0).nonzero()[0]
        before = load[BACKLOG].copy()
        if digest.kind is not DigestKind.CHANGES:
            load[:] = 0.0
        load[:, rows[known]] = digest.figures[:, known]
        self._patience[place] = STALE_S if load[REQUESTS].any() else STALE_S + WHOLE_EVERY_S
        self._add_up()
        # Where prompts were added, the step in progress is as long as they make it.
        longer = (load[BACKLOG] > before + 1.0).nonzero()[0]
        backlog = replicas.enqueued[longer] - replicas.prefilled[longer]
        counts = self._counts.copy()
        counts[place] = 1.0  # the peer of this digest is about to count
        backlog += counts @ self._load[BACKLOG][:, longer]
        replicas.chunk[longer] = np.clip(backlog, 1.0, replicas.token_budget[longer])

    def _add_up(self) -> None:
        self.counted = bool(self._counts.any())
        np.matmul(self._counts, self._load[:FIGURES], out=self._replicas.peers)

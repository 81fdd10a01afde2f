"""What peers, the other routers, have in flight, by their digests, moved forward in between."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from extproc.fleet.digest import (
    BACKLOG,
    DECODING,
    FIGURES,
    JOINING,
    KV,
    PARTS,
    PER_SEQUENCE,
    REQUESTS,
    WHOLE_EVERY_S,
    Digest,
    Kind,
)
from extproc.fleet.tables import Replicas
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats, Indices

STALE_S = 0.1  # seconds: in simulation, sharing later than this is worse than none
DEAD_S = 1.5  # seconds of silence after which a router is gone: three whole digests


@dataclass(slots=True)
class _Peer:
    place: int  # where its load stands
    number: int
    heard_at: float
    busy: bool


class Peers:
    """Peers' load: sums per replica in the table, and sequences.

    It counts while its news is fresh; else what the last poll saw of it does, as of nobody known.
    The age of news is the time since it arrived, and what the router's own digests take to come
    back to it: so clocks of two machines are never compared.
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
        self._peers: dict[str, _Peer] = {}
        self._load = np.zeros((FIGURES, 0, 0))
        self._lag = 0.0
        self._cut_off_since = inf
        self._dead_at = inf
        self._left_out_at = inf  # when the load stopped counting
        self._owner = np.zeros(0, np.intp)  # the peer's place, for each bar of all histograms
        self._on = np.zeros(0, np.intp)  # row of the replica
        self._since = np.zeros(0)  # the replica's step count when it was heard of
        self._sequences = np.zeros((PER_SEQUENCE, 0))
        self.counted = False  # whether there are others whose load counts
        self.news_age: float | None = None
        """Seconds since the newest news was sent, at the last look; None where there are no others.
        Of those with requests in flight, if any: the rest speak less often."""
        self.stale = False  # there are others, and their news is too old to count

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def expected(self) -> bool:
        """Whether there are others, or were when nothing could be heard any more."""
        return bool(self._peers) or self._cut_off_since < inf

    # -- what is heard ----------------------------------------------------------------------

    def hear(self, digest: Digest, age: float = 0.0) -> None:
        """A digest arrived, ``age`` seconds after Redis got it.

        Progress must be up to date. One that is older than the last is passed over.
        """
        now = self._clock() - age
        if digest.router == self._own:
            self._lag = max(self._wall() - age - digest.sent_at, 0.0)
            return
        peer = self._peers.get(digest.router)
        if peer is not None and digest.number <= peer.number:
            return
        if digest.kind is Kind.FAREWELL:
            self._forget(digest.router)
            return
        first = peer is None
        if peer is None:
            peer = self._join(digest.router)
        peer.number, peer.heard_at = digest.number, now
        self._dead_at = min(one.heard_at for one in self._peers.values()) + DEAD_S
        if digest.replicas or digest.kind is Kind.WHOLE:
            before = self._load[:, peer.place].copy()
            self._take(peer, digest)
            self._lengthen_steps(before, peer)
            self._add_up()
            if first and self.counted:
                load = self._load[:, peer.place]
                self._explain(load[PARTS], load[KV])

    def cut_off(self) -> None:
        """Nothing can be heard any more; until :meth:`hear` is called for again, others that were
        there are taken to be there still."""
        if self._peers and self._cut_off_since == inf:
            self._cut_off_since = self._clock()

    def connected(self) -> None:
        self._cut_off_since = inf

    def look(self, now: float) -> bool:
        """Forgets who is dead, and counts the others while their news is fresh.

        Returns whether the sums are others than before.
        """
        if not self._peers and self._cut_off_since == inf:
            self.news_age, self.stale = None, False
            return False
        known, counted = len(self._peers), self.counted
        if now > self._dead_at:
            for name, peer in list(self._peers.items()):
                if now - peer.heard_at > DEAD_S:
                    self._forget(name)
        age, patience = self._news(now)
        self.news_age, self.stale = age, age is not None and age > patience
        fresh = bool(self._peers) and not self.stale
        if fresh != self.counted:
            self.counted = fresh
            self._add_up()
            if fresh:
                self._explain_again()
            else:
                self._leave_unexplained(now)
        return (known, counted) != (len(self._peers), self.counted)

    def _news(self, now: float) -> tuple[float | None, float]:
        """The age of the newest news, and what it may be; of those with requests, if any."""
        if not self._peers:
            return None if self._cut_off_since == inf else now - self._cut_off_since, 0.0
        busy = [peer.heard_at for peer in self._peers.values() if peer.busy]
        newest = max(busy or (peer.heard_at for peer in self._peers.values()))
        patience = STALE_S if busy else STALE_S + WHOLE_EVERY_S
        if self._lag > STALE_S:
            patience = STALE_S
        return now - newest + self._lag, patience

    # -- what it adds up to -----------------------------------------------------------------

    def move(self, part: Floats | float, tokens: Floats) -> None:
        """Moves the load forward: that part of each backlog is prefilled, and each sequence gets so
        many tokens."""
        load = self._load
        if not load.size:
            return
        if isinstance(part, np.ndarray):
            gone = load[: BACKLOG + 1] * part
            gone[REQUESTS] = 0.0
            load[: BACKLOG + 1] -= gone
            load[DECODING] += gone[JOINING]
            load[KV] += gone[BACKLOG]
        load[KV] += load[DECODING] * tokens
        self._add_up()

    def beside(self, on: Indices, figures: Floats) -> tuple[Indices, Floats]:
        """The others' sequences, moved forward, beside these."""
        made = np.maximum(self._replicas.steps[self._on] - self._since, 0.0)
        made *= self._replicas.tokens_per_step[self._on]
        moved = self._sequences.copy()
        moved[1] += made
        moved[2] = np.maximum(moved[2] - made, np.minimum(moved[2], 1.0))
        unknown = np.full((len(figures) - len(moved), moved.shape[1]), inf)
        moved = np.vstack([moved, unknown])
        return np.concatenate([on, self._on]), np.hstack([figures, moved])

    @property
    def decoded(self) -> Floats:
        """Seconds of decoding, actual and predicted, a column a replica."""
        return np.array([self._replicas.peers_decoded, self._replicas.peers_expected])

    def clear(self, row: int) -> None:
        missing = len(self._replicas) - self._load.shape[2]
        self._load = np.pad(self._load, ((0, 0), (0, 0), (0, missing)))
        self._load[:, :, row] = 0.0
        self._keep(self._on != row)
        self._add_up()

    def _join(self, name: str) -> _Peer:
        place = len(self._peers)
        self._load = np.concatenate(
            [self._load, np.zeros((FIGURES, 1, len(self._replicas)))], axis=1
        )
        peer = self._peers[name] = _Peer(place, 0, 0.0, False)
        if place == 0:
            self.counted = True
            self._replicas.explained[:] = self._replicas.kv_explained[:] = 0.0
        return peer

    def _forget(self, name: str) -> None:
        gone = self._peers.pop(name, None)
        if gone is None:
            return
        self._load = np.delete(self._load, gone.place, axis=1)
        self._keep(self._owner != gone.place)
        self._owner -= self._owner > gone.place
        for peer in self._peers.values():
            peer.place -= peer.place > gone.place
        self.counted = self.counted and bool(self._peers)
        self._dead_at = min((r.heard_at for r in self._peers.values()), default=inf) + DEAD_S
        self._add_up()

    def _take(self, peer: _Peer, digest: Digest) -> None:
        """The digest's figures in place of those before, for the replicas it is about."""
        load = self._load[:, peer.place]
        rows = np.array([self._rows.get(name, -1) for name in digest.replicas], dtype=np.intp)
        known = (rows >= 0).nonzero()[0]
        about = np.zeros(len(self._replicas), dtype=bool)
        about[rows[known]] = True
        if digest.kind is Kind.WHOLE:
            about[:] = True
        load[:, about] = 0.0
        load[:, rows[known]] = digest.figures[:, known]
        peer.busy = bool(load[REQUESTS].any())
        self._keep((self._owner != peer.place) | ~about[self._on])
        on = rows[digest.on]
        here = (on >= 0).nonzero()[0]
        self._owner = np.concatenate([self._owner, np.full(len(here), peer.place)])
        self._on = np.concatenate([self._on, on[here]])
        self._since = np.concatenate([self._since, self._replicas.steps[on[here]]])
        self._sequences = np.hstack([self._sequences, digest.sequences[:, here]])

    def _keep(self, bars: NDArray[np.bool_]) -> None:
        self._owner, self._on, self._since = self._owner[bars], self._on[bars], self._since[bars]
        self._sequences = self._sequences[:, bars]

    def _lengthen_steps(self, before: Floats, peer: _Peer) -> None:
        """Where prompts were added, the step in progress is as long as they make it."""
        replicas, load = self._replicas, self._load
        longer = (load[BACKLOG, peer.place] > before[BACKLOG] + 1.0).nonzero()[0]
        own = replicas.enqueued[longer] - replicas.prefilled[longer]
        backlog = own + load[BACKLOG][:, longer].sum(axis=0)
        replicas.chunk[longer] = np.clip(backlog, 1.0, replicas.token_budget[longer])

    def _add_up(self) -> None:
        self._replicas.peers[:] = self._load.sum(axis=1) if self.counted else 0.0

    def _explain(self, sequences: Floats, kv: Floats) -> None:
        """What polls saw beyond the router's own requests was this, or some of it."""
        replicas = self._replicas
        sequences = np.minimum(sequences, replicas.beyond)
        kv = np.where(replicas.sampled_at < inf, kv, 0.0)
        replicas.foreign[:] = np.maximum(replicas.foreign - sequences, 0.0)
        replicas.beyond -= sequences
        replicas.kv_beyond -= kv
        replicas.explained += sequences
        replicas.kv_explained += kv

    def _leave_unexplained(self, now: float) -> None:
        """What polls saw, and the load explained, is nobody's known any more."""
        replicas = self._replicas
        self._left_out_at = now
        replicas.foreign += replicas.explained
        replicas.beyond += replicas.explained
        replicas.kv_beyond += replicas.kv_explained

    def _explain_again(self) -> None:
        """As before; where a poll came since, by all of the load: it may have seen all."""
        replicas, load = self._replicas, self._load.sum(axis=1)
        polled = replicas.sampled_at > self._left_out_at
        sequences = np.where(polled, load[PARTS], replicas.explained)
        kv = np.where(polled, load[KV], replicas.kv_explained)
        replicas.explained[:] = replicas.kv_explained[:] = 0.0
        self._explain(sequences, kv)

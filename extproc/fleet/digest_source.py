"""Source of the router's own digests, built from its tables when they are due."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from extproc.fleet.digest import ALIVE_S, EVERY_S, NOTHING, WHOLE_EVERY_S, Digest, DigestKind
from extproc.fleet.members import Members
from extproc.fleet.progress import Progress
from extproc.fleet.speeds import Speeds
from extproc.fleet.tables import Replicas, Requests
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats, Indices

_SOON = EVERY_S / 2  # seconds by which a digest may be early; at the next call it would be late
_NOTABLE_S = 0.1  # recent decode seconds that put a replica without requests into a whole digest


@dataclass(eq=False)
class DigestSource:
    """Builds digests of changes, whole digests, and empty digests as signs of life.

    A generated token is not a change, because receivers move decoding requests forward themselves.
    """

    _router: str
    _replicas: Replicas
    _requests: Requests
    _progress: Progress
    _speeds: Speeds
    _members: Members
    _wall: Clock
    admin: str = ""  # see Digest
    queued: Callable[[], dict[str, dict[int, float]]] = dict  # see Digest
    _number: int = field(default=0, init=False)
    _sent: Floats = field(default_factory=lambda: np.zeros((3, 0)), init=False)  # last `_counts`
    _sent_queue: dict[str, dict[int, float]] = field(default_factory=dict, init=False)
    _sent_at: float = field(default=-inf, init=False)
    _whole_at: float = field(default=-inf, init=False)

    def due(self, now: float, no_peers: bool = False) -> Digest | None:
        """Returns the digest to send ``now`` (seconds on the fleet's clock), or None; call it every
        ``EVERY_S``.

        ``no_peers``: no other router is known. Then whole digests suffice, because a router that
        starts reads the last whole digest from Redis.
        """
        overdue = now - self._whole_at > WHOLE_EVERY_S - _SOON
        if no_peers and not overdue:
            return None
        replicas = self._replicas
        counts = self._counts()
        whole = overdue or counts.shape != self._sent.shape
        if whole:
            observed = self._speeds.corrections.sums(now)[1] > _NOTABLE_S
            rows = ((replicas.requests > 0.0) | observed).nonzero()[0]
        else:
            rows = (counts != self._sent).any(axis=0).nonzero()[0]
            if not len(rows):
                if now - self._sent_at <= ALIVE_S - _SOON:
                    return None
                if not len(self._requests) and self.queued() == self._sent_queue:
                    return None
        digest = self._digest(DigestKind.WHOLE if whole else DigestKind.CHANGES, rows, now)
        self._sent, self._sent_at = self._counts(), now
        if whole:
            self._whole_at = now
        return digest

    def _counts(self) -> Floats:
        """Returns, by replica, the figures that change whenever a request is dispatched or ends."""
        replicas = self._replicas
        return np.array([replicas.requests, replicas.queued, replicas.enqueued])

    def repeat(self) -> None:
        """Makes the next digest a whole one, because the last digest may be lost."""
        self._whole_at = -inf

    def farewell(self) -> Digest:
        return self._digest(DigestKind.FAREWELL, np.zeros(0, dtype=np.intp), self._sent_at)

    def _digest(self, kind: DigestKind, rows: Indices, now: float) -> Digest:
        self._number += 1
        figures = NOTHING
        if len(rows):
            self._progress.advance(now)
            self._progress.refresh()
            self._progress.look_ahead()
            figures = self._figures(now)[:, rows]
        ids = tuple(self._members.by_row[row].id for row in rows)
        admin = self.admin if kind is DigestKind.WHOLE else ""
        at, queued = self._wall(), self.queued()
        sent, self._sent_queue = self._sent_queue, queued
        if kind is DigestKind.CHANGES:
            queued = {
                id_: queued.get(id_, {})
                for id_ in sent | queued
                if sent.get(id_) != queued.get(id_)
            }
        return Digest(self._router, self._number, at, kind, ids, figures, admin, queued)

    def _figures(self, now: float) -> Floats:
        replicas, requests = self._replicas, self._requests
        on, count = requests.replica, len(replicas)
        joining = np.bincount(on, requests.weight * (requests.steps_before == inf), count)
        generated = np.bincount(on, requests.weight * requests.generated, count)
        backlog = replicas.enqueued - replicas.prefilled
        prefilled_in_part = replicas.joining - backlog
        remaining = np.bincount(on, requests.weight * requests.remaining, count)
        decoded, expected = self._speeds.corrections.sums(now)
        return np.array(
            [
                replicas.requests,
                replicas.queued,
                joining,
                np.maximum(backlog, 0.0),
                np.maximum(replicas.decoding, 0.0),
                np.maximum(replicas.held + generated + prefilled_in_part, 0.0),
                remaining,
                decoded,
                expected,
                np.bincount(on, requests.parts, count),
            ]
        )

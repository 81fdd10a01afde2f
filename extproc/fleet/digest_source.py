"""The router's own digest, taken from its tables when it is due."""

from collections.abc import Sequence
from math import inf

import numpy as np

from extproc.fleet.digest import (
    ALIVE_S,
    EVERY_S,
    NOTHING,
    WHOLE_EVERY_S,
    Digest,
    DigestKind,
)
from extproc.fleet.progress import Progress
from extproc.fleet.tables import Replicas, Requests
from extproc.ground.clock import Clock
from extproc.predict.correction import Corrections
from extproc.predict.inputs import Floats, Indices
from extproc.replica_state import ReplicaState

_SOON = EVERY_S / 2  # seconds: what is due before the next time it is asked is due
_NOTABLE = 0.1  # seconds of decoding that are worth to be told, though nothing is in flight there


class DigestSource:
    """Makes digests: of what changed, now and then a whole one, and at times an empty one.

    Requests that go on as was to be expected change nothing: who hears of them moves them forward.
    """

    def __init__(
        self,
        router: str,
        replicas: Replicas,
        requests: Requests,
        progress: Progress,
        corrections: Corrections,
        states: Sequence[ReplicaState],
        wall: Clock,
    ) -> None:
        self._router = router
        self._replicas = replicas
        self._requests = requests
        self._progress = progress
        self._corrections = corrections
        self._states = states
        self._wall = wall
        self._number = 0
        self._told = np.zeros((3, 0))
        self._sent_at = -inf
        self._whole_at = -inf

    def due(self, now: float, no_peers: bool = False) -> Digest | None:
        """The digest to send now; None where none is. To be asked every ``EVERY_S``.

        Args:
            now: seconds.
            no_peers: none was heard of, so that whole ones are enough: whoever comes finds the last
                one in Redis, and is heard of at once.
        """
        overdue = now - self._whole_at > WHOLE_EVERY_S - _SOON
        if no_peers and not overdue:
            return None
        replicas = self._replicas
        current = self._changing()
        whole = overdue or current.shape != self._told.shape
        if whole:
            seen = self._corrections.sums(now)[1] > _NOTABLE
            rows = ((replicas.requests > 0.0) | seen).nonzero()[0]
        else:
            rows = (current != self._told).any(axis=0).nonzero()[0]
            silent = now - self._sent_at
            if not len(rows) and not (len(self._requests) and silent > ALIVE_S - _SOON):
                return None
        digest = self._digest(DigestKind.WHOLE if whole else DigestKind.CHANGES, rows, now)
        self._told, self._sent_at = self._changing(), now
        if whole:
            self._whole_at = now
        return digest

    def _changing(self) -> Floats:
        """What every event changes, for each replica."""
        replicas = self._replicas
        return np.array([replicas.requests, replicas.queued, replicas.enqueued])

    def repeat(self) -> None:
        """The last one may not have arrived: the next is a whole one."""
        self._whole_at = -inf

    def farewell(self) -> Digest:
        """The last one, of a router that stops."""
        return self._digest(DigestKind.FAREWELL, np.zeros(0, dtype=np.intp), self._sent_at)

    def _digest(self, kind: DigestKind, rows: Indices, now: float) -> Digest:
        self._number += 1
        figures = NOTHING
        if len(rows):
            self._progress.advance(now)
            self._progress.refresh()
            self._progress.look_ahead()
            figures = self._figures(now)[:, rows]
        ids = tuple(self._states[row].id for row in rows)
        return Digest(self._router, self._number, self._wall(), kind, ids, figures)

    def _figures(self, now: float) -> Floats:
        replicas, requests = self._replicas, self._requests
        on, count = requests.replica, len(replicas)
        joining = np.bincount(on, requests.weight * (requests.steps_before == inf), count)
        generated = np.bincount(on, requests.weight * requests.generated, count)
        backlog = np.maximum(replicas.enqueued - replicas.prefilled, 0.0)
        remaining = np.bincount(on, requests.weight * requests.remaining, count)
        decoded, expected = self._corrections.sums(now)
        return np.array(
            [
                replicas.requests,
                replicas.queued,
                joining,
                backlog,
                np.maximum(replicas.decoding, 0.0),
                np.maximum(replicas.held + generated + replicas.prefilling, 0.0),
                remaining,
                decoded,
                expected,
                np.bincount(on, requests.parts, count),
            ]
        )

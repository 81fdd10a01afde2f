"""Moves the requests in flight forward between polls."""

import numpy as np

from extproc.fleet.polls import fade
from extproc.fleet.table import Table
from extproc.fleet.view import Floats
from extproc.predict.lengths import OutputLengths

_TICK = 0.002
"""Seconds: shorter than any step, so nothing is worth moving forward by less."""
_LONGEST_UNREFRESHED = 0.05
"""Seconds over which the sums per replica may be moved forward unchanged."""
_ROUNDING = 1e-6
"""Tokens."""


class Progress:
    """How far every request in flight has come, by the step models of the replicas.

    On each replica the prompts sent are prefilled in order, and every step gives each decoding
    sequence a token. So a request's progress is a difference of two of the replica's counts: it
    decodes from when the prompt tokens prefilled have reached its mark, and has as many tokens as
    there were steps since.
    """

    def __init__(
        self, replicas: Table, requests: Table, lengths: OutputLengths, now: float
    ) -> None:
        self._replicas = replicas
        self._requests = requests
        self._lengths = lengths
        self._as_of = now
        self._refreshed_at = now
        self._changed = False

    def changed(self) -> None:
        """Requests came, went or moved on: the sums are out of date."""
        self._changed = True

    def advance(self, now: float) -> None:
        """Brings the replicas' counts up to ``now``, where that is worth it."""
        elapsed = now - self._as_of
        if elapsed >= _TICK:
            self._as_of = now
            self._move(elapsed)
            self._changed = True
            if now - self._refreshed_at > _LONGEST_UNREFRESHED:
                self.refresh()

    def refresh(self) -> None:
        """Brings the requests, and the sums over them, in line with the replicas' counts."""
        if self._changed:
            self._changed = False
            self._refreshed_at = self._as_of
            self._start_decoding()
            self._measure()
            self._sum_up()

    def _move(self, elapsed: float) -> None:
        replicas = self._replicas
        decoding: Floats | float = elapsed
        backlog = replicas["enqueued"] - replicas["prefilled"]
        if (backlog > _ROUNDING).any():
            decoding = elapsed - self._prefill(backlog, elapsed)
        replicas["steps"][:] += decoding / replicas["decode_step"] * (replicas["batch"] > 0)

    def _prefill(self, backlog: Floats, elapsed: float) -> Floats:
        """Prefills the backlogs; returns the seconds that took."""
        replicas = self._replicas
        chunk = replicas["chunk"]
        step = replicas["decode_step"] + replicas["c_prefill"] * chunk
        drain = backlog * step / chunk
        taken: Floats = np.minimum(elapsed, drain)
        replicas["prefilled"][:] = np.where(
            taken >= drain, replicas["enqueued"], replicas["prefilled"] + taken * chunk / step
        )
        replicas["steps"][:] += taken / step
        if self._start_decoding():
            self._measure()
            self._sum_up()
        return taken

    def _measure(self) -> None:
        """The progress of each request."""
        requests = self._requests
        generated = self._replicas["steps"][requests["replica"]] - requests["first_step"] + 1.0
        np.minimum(np.maximum(generated, 0.0, out=generated), requests["bound"], out=generated)
        requests["generated"][:] = generated
        requests["remaining"][:] = np.maximum(
            self._lengths.remaining(requests["lengths"], generated, requests["bound"]),
            requests["least"] - generated,
        )

    def _sum_up(self) -> None:
        """Per replica the sums over its requests."""
        replicas, requests = self._replicas, self._requests
        fade(replicas, self._as_of)
        count, on, weight = len(replicas), requests["replica"], requests["weight"]
        started = requests["first_step"] < np.inf
        batch = np.bincount(on, weight * started, minlength=count) + replicas["foreign"]
        held = np.bincount(
            on, requests["prompt"] * started + weight * requests["generated"], minlength=count
        )
        kv_used = np.maximum(held + replicas["kv_beyond"], 0.0)
        replicas["requests"][:] = np.bincount(on, minlength=count)
        replicas["batch"][:] = batch
        replicas["kv_used"][:] = kv_used
        replicas["decode_step"][:] = (
            replicas["c0"] + replicas["c_batch"] * batch + replicas["c_kv"] * kv_used
        )

    def _start_decoding(self) -> bool:
        """Those whose prompt is prefilled have their first token; returns whether any has."""
        requests, replicas = self._requests, self._replicas
        waiting = np.flatnonzero(requests["first_step"] == np.inf)
        if not len(waiting):
            return False
        on = requests["replica"][waiting]
        prefilled = requests["mark"][waiting] <= replicas["prefilled"][on] + _ROUNDING
        requests["first_step"][waiting[prefilled]] = replicas["steps"][on[prefilled]]
        return bool(prefilled.any())

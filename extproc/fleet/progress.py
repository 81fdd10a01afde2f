"""Progress of the requests in flight, moved forward between polls."""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from extproc.fleet.digest import BACKLOG, DECODING, KV
from extproc.fleet.peers import Peers
from extproc.fleet.tables import Replicas, Requests, count
from extproc.predict.inputs import Floats, Indices, most
from extproc.predict.lengths import OutputLengths

_TICK = 0.005  # seconds by which requests move forward at least; shorter than any step
_LONGEST_UNREFRESHED = 0.05  # seconds for which the sums of replicas may stay unchanged
_ROUNDING = 1e-6  # tokens


@dataclass(eq=False)
class Progress:
    """Progress of every request in flight, by the step models of the replicas.

    A replica prefills prompts in order, and each step gives each decoding sequence a token, or
    several with speculative decoding. So two counts of the replica give a request's progress: the
    request decodes once the count of prefilled prompt tokens reaches the end of its prompt, and has
    a token for each step since then.
    """

    _replicas: Replicas
    _requests: Requests
    _peers: Peers
    _lengths: OutputLengths
    _as_of: float  # time up to which the requests were moved forward, in seconds on the clock
    refreshed_at: float = field(init=False)  # time of the last refresh; at first, the start
    _changed: bool = field(default=False, init=False)
    _looked_ahead: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.refreshed_at = self._as_of

    def invalidate(self) -> None:
        """Makes :meth:`refresh` compute the sums over each replica's requests anew."""
        self._changed = True

    def remove(self, row: int) -> None:
        """Subtracts an ended request from the sums of its replica.

        All sums are computed anew only at the next tick: at thousands of requests a second, a
        computation at each end of a request would be half of a router's work.
        """
        requests, replicas = self._requests, self._replicas
        if requests.steps_before.item(row) == inf:
            return
        on, weight = requests.replica.item(row), requests.weight.item(row)
        held = weight * (requests.generated.item(row) + requests.each.item(row))
        shared = replicas.kv_unattributed.item(on)
        if shared < 0.0:  # the poll counted shared blocks once
            shared *= held / max(replicas.kv_used.item(on) - shared, held)
            replicas.kv_unattributed[on] -= shared
            held += shared
        replicas.kv_used[on] = max(replicas.kv_used.item(on) - held, 0.0)
        replicas.batch[on] = max(replicas.batch.item(on) - weight, 0.0)
        self._set_step(on)

    def _set_step(self, row: int) -> None:
        replicas = self._replicas
        loaded = replicas.c_batch.item(row) * replicas.batch.item(row)
        loaded += replicas.c_kv.item(row) * replicas.kv_used.item(row)
        replicas.decode_step[row] = replicas.c0.item(row) + loaded

    def advance(self, now: float) -> None:
        """Moves the replicas' counts forward to ``now``, unless they are less than a tick
        behind."""
        elapsed = now - self._as_of
        if elapsed >= _TICK:
            self._as_of = now
            self._move(elapsed)
            self._changed = True
            if now - self.refreshed_at > _LONGEST_UNREFRESHED:
                self.refresh()

    def corrected(self, row: int, own: Indices) -> None:
        """Updates a replica's sums, and its requests (``own``: their rows), after a poll corrected
        the replica's counts."""
        requests, replicas = self._requests, self._replicas
        kv = 0.0
        if len(own):
            done = requests.prompt_end[own] <= replicas.prefilled.item(row) + _ROUNDING
            decoding = requests.steps_before[own] < inf
            if len((done != decoding).nonzero()[0]):
                self._start(own[done & ~decoding])
                self._requeue(own[decoding & ~done])
            kv = float(requests.weight[own] @ self._set_generated(own))
        kv += replicas.held.item(row) + replicas.kv_unattributed.item(row)
        kv += replicas.peers.item(KV, row)
        batch = replicas.decoding.item(row) + replicas.external.item(row)
        replicas.batch[row] = batch + replicas.peers.item(DECODING, row)
        replicas.kv_used[row] = max(kv, 0.0)
        self._set_step(row)
        if len(own):
            self._look_ahead(own)

    def refresh(self) -> None:
        """Brings requests, and their sums by replica, up to date with the replicas' counts."""
        if self._changed:
            self._changed = False
            self._looked_ahead = False
            self.refreshed_at = self._as_of
            self._start_decoding()
            self._sum_up()

    def look_ahead(self) -> None:
        """Computes the expected remaining output of all requests, as of the last refresh."""
        if not self._looked_ahead:
            self._looked_ahead = True
            self._look_ahead(slice(None))

    def _look_ahead(self, rows: Indices | slice) -> None:
        requests = self._requests
        generated = requests.generated[rows]
        requests.context[rows] = requests.each[rows] + generated
        # Few requests have left their bucket, and a search for 12,000 requests takes 0.3 ms.
        passed = (generated >= requests.until[rows]).nonzero()[0]
        if len(passed):
            passed = passed if isinstance(rows, slice) else rows[passed]
            requests.alive[passed], requests.until[passed] = self._lengths.reached(
                requests.lengths[passed], requests.generated[passed]
            )
        requests.remaining[rows] = self._lengths.remaining(
            requests.alive[rows],
            requests.cut[rows],
            generated,
            requests.bound[rows],
            requests.least_output[rows],
        )

    def _move(self, elapsed: float) -> None:
        replicas = self._replicas
        decoding: Floats | float = elapsed
        part: Floats | float = 0.0
        queue = replicas.enqueued - replicas.prefilled
        if replicas.peers_count:
            queue += replicas.peers[BACKLOG]
        before = replicas.steps.copy() if replicas.peers_count else replicas.steps
        if len((queue > _ROUNDING).nonzero()[0]):
            taken, part = self._prefill(elapsed, queue)
            decoding = elapsed - taken
        replicas.steps += decoding / replicas.decode_step * (replicas.batch > 0)
        if replicas.peers_count:
            self._peers.move(part, (replicas.steps - before) * replicas.tokens_per_step)

    def _prefill(self, elapsed: float, queue: Floats) -> tuple[Floats, Floats]:
        """Prefills for ``elapsed`` seconds. Returns, by replica, the seconds used and the part of
        the ``queue`` (prompt tokens) that was prefilled.

        The order of prompts from several routers is unknown, so every router's backlog shrinks by
        the same share.
        """
        replicas = self._replicas
        chunk = replicas.chunk
        rate = chunk / (replicas.decode_step + replicas.c_prefill * chunk)
        done = np.minimum(elapsed * rate, queue)
        part = done / np.maximum(queue, _ROUNDING)
        replicas.prefilled += (replicas.enqueued - replicas.prefilled) * part
        # vLLM counts only steps that generate a token.
        replicas.steps += done / chunk * (replicas.batch > 0)
        if self._start_decoding():
            self._sum_up()
        return done / rate, part

    def _start_decoding(self) -> bool:
        """Lets requests with a prefilled prompt decode; returns True if there were any."""
        requests, replicas = self._requests, self._replicas
        waiting = (requests.steps_before == inf).nonzero()[0]
        if not len(waiting):
            return False
        prefilled = replicas.prefilled[requests.replica[waiting]] + _ROUNDING
        started = waiting[requests.prompt_end[waiting] <= prefilled]
        self._start(started)
        return bool(len(started))

    def _start(self, rows: Indices) -> None:
        requests, replicas = self._requests, self._replicas
        for row in rows.tolist():
            on, weight = requests.replica.item(row), requests.weight.item(row)
            replicas.queued[on] -= 1.0
            replicas.joining[on] -= requests.prompt.item(row)
            replicas.decoding[on] += weight
            replicas.held[on] += weight * requests.each.item(row)
            requests.steps_before[row] = replicas.steps.item(on) - 1.0
            requests.began_at[row] = self._as_of

    def _requeue(self, rows: Indices) -> None:
        for row in rows.tolist():
            count(self._replicas, self._requests, row, -1)
            self._requests.steps_before[row] = inf
            count(self._replicas, self._requests, row, 1)

    def _set_generated(self, rows: Indices | slice) -> Floats:
        """Sets and returns the generated tokens, from the replica's steps since the first token."""
        requests, replicas = self._requests, self._replicas
        on = requests.replica[rows]
        generated = replicas.steps[on] - requests.steps_before[rows]
        if len(on) and most(replicas.tokens_per_step) > 1.0:
            generated *= replicas.tokens_per_step[on]
        np.maximum(generated, 0.0, out=generated)
        np.minimum(generated, requests.bound[rows], out=generated)
        requests.generated[rows] = generated
        return generated

    def _sum_up(self) -> None:
        replicas, requests = self._replicas, self._requests
        generated = self._set_generated(slice(None))
        replicas.drop_stale_load(self._as_of)
        np.add(replicas.decoding, replicas.external, out=replicas.batch)
        made = np.bincount(requests.replica, requests.weight * generated, len(replicas))
        kv = made + replicas.held
        if replicas.peers_count:
            replicas.batch += replicas.peers[DECODING]
            kv += replicas.peers[KV]
        np.maximum(kv + replicas.kv_unattributed, 0.0, out=replicas.kv_used)
        loaded = replicas.c_batch * replicas.batch + replicas.c_kv * replicas.kv_used
        np.add(replicas.c0, loaded, out=replicas.decode_step)

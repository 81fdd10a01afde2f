"""Every replica in memory: what polls said, what this router sent, and how far it has come."""

from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from extproc.clock import Clock, monotonic
from extproc.fleet.health import Health
from extproc.fleet.ledger import UNBOUNDED, Ledger, Ticket
from extproc.fleet.polls import correct, restart, set_hardware
from extproc.fleet.progress import Progress
from extproc.fleet.state import ReplicaState
from extproc.fleet.tables import COSTS, replica_table, request_table
from extproc.fleet.view import FleetView, Indices, Sequences, StepCosts
from extproc.predict.correction import Correction
from extproc.predict.lengths import OutputLengths
from extproc.request.profile import RequestProfile

_SILENCE = 2.0
"""Seconds without news of any replica: longer than any pause between polls."""
_MODELS_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The replicas that may serve a model; they change seldom."""

    rows: Indices
    ids: list[str]
    names: list[str]


class Fleet:
    """The replicas of a pool and this router's requests on them.

    Between polls the fleet moves itself forward (:class:`~extproc.fleet.progress.Progress`). A poll
    corrects the count of steps, the end of a response corrects the prefill.
    """

    def __init__(self, lengths: OutputLengths, clock: Clock = monotonic) -> None:
        self.lengths = lengths
        self.health = Health(clock)
        self._clock = clock
        self._rows: dict[str, int] = {}
        self._states: list[ReplicaState] = []
        """By row of the table; those of replicas that left stay until the row is used again."""
        self._replicas = replica_table()
        self._requests = request_table()
        self._progress = Progress(self._replicas, self._requests, lengths, clock())
        self._ledger = Ledger(self._replicas, self._requests, self._progress, lengths)
        self._candidates: dict[str, _Candidates] = {}
        self._corrections: dict[str, Correction] = {}
        self._heard_at = clock()
        self._heard_since = self._heard_at

    # -- membership and polls ---------------------------------------------------------------

    @property
    def heard_at(self) -> float:
        """When the last news of any replica came, on the fleet's clock; at first, its start."""
        return self._heard_at

    @property
    def states(self) -> list[ReplicaState]:
        """What the last poll said of each member."""
        return [self._states[row] for row in self._rows.values()]

    @property
    def only_model(self) -> str | None:
        """A model that every member serves, where they all serve the same; else None."""
        served = {state.models for state in self.states}
        names = served.pop() if len(served) == 1 else ()
        return names[0] if names else None

    def put(self, state: ReplicaState, age: float = 0.0) -> None:
        """A poll's news of one replica; a new one joins. Dispatches newer than it stay on top.

        Args:
            state: what the poll saw.
            age: seconds since then, on the way here.
        """
        now = self._clock()
        self._progress.advance(now)
        self._hear(now)
        before = self._states[self._rows[state.id]] if state.id in self._rows else None
        row = self._join(state) if before is None else self._rows[state.id]
        if before is None or _seen_by_policies(state) != _seen_by_policies(before):
            self._candidates.clear()
        self._states[row] = state
        self._replicas["heard_at"][row] = now
        set_hardware(self._replicas, row, state, before)
        if state.healthy:
            if state.steps < self._replicas["polled_steps"][row]:
                restart(self._replicas, self._requests, row, state.steps)
            sampled_at = now - age - state.scrape_seconds / 2
            correct(self._replicas, self._requests, row, state, sampled_at, now)
        self._progress.changed()

    def remove(self, replica: str) -> None:
        """A replica left the pool; its requests in flight stay until they end."""
        self._rows.pop(replica, None)
        self.health.forget(replica)
        self._corrections.pop(replica, None)
        self._candidates.clear()

    def drop_silent(self, after: float) -> None:
        """Removes replicas not heard of for ``after`` seconds in which others were.

        When nothing at all is heard, pollers or Redis are gone: the replicas are still there.
        """
        if self._heard_at - self._heard_since < after:
            return
        heard = {name: self._replicas["heard_at"][row] for name, row in self._rows.items()}
        latest = max(heard.values(), default=0.0)
        for name, at in heard.items():
            if latest - at > after:
                self.remove(name)

    def _hear(self, now: float) -> None:
        if now - self._heard_at > _SILENCE:
            self._heard_since = now
        self._heard_at = now

    def _join(self, state: ReplicaState) -> int:
        """A row for a replica: the one it had, so that its requests are still on it; else one that
        nobody uses; else a new one."""
        departed = [row for row, known in enumerate(self._states) if known.id == state.id]
        if departed:
            self._rows[state.id] = departed[0]
            return departed[0]
        taken = set(self._rows.values()) | set(self._requests["replica"].tolist())
        free = [row for row in range(len(self._replicas)) if row not in taken]
        if free:
            row = free[0]
        else:
            row = self._replicas.append()
            self._states.append(state)
        self._replicas.write(
            row, steps=state.steps, polled_steps=state.steps, chunk=1.0, stretch=1.0
        )
        set_hardware(self._replicas, row, state, None)
        self._replicas["decode_step"][row] = self._replicas["c0"][row]
        self._rows[state.id] = row
        self._corrections[state.id] = Correction(self._clock())
        return row

    # -- this router's requests -------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests in this router's ledger."""
        return len(self._ledger)

    def in_flight_on(self, replica: str) -> int:
        """Requests in this router's ledger on that replica."""
        row = self._rows.get(replica)
        return 0 if row is None else int((self._requests["replica"] == row).sum())

    def dispatch(self, replica: str, profile: RequestProfile) -> Ticket:
        """Takes a request into the ledger as sent to ``replica`` now.

        Raises:
            KeyError: the replica is not a member.
        """
        row = self._rows[replica]
        now = self._clock()
        self._progress.advance(now)
        return self._ledger.take(row, profile, now, self._states[row].max_model_len)

    def move(self, ticket: Ticket, replica: str) -> None:
        """The request was served by another replica than it was sent to (a retry).

        Does nothing where that replica is not a member.
        """
        row = self._rows.get(replica)
        if row is not None:
            self._progress.advance(self._clock())
            self._ledger.move(ticket, row)

    def first_token(self, ticket: Ticket) -> None:
        """Its first token was seen: its prompt is prefilled, and all that were queued before it."""
        self._progress.advance(self._clock())
        self._ledger.first_token(ticket)

    def release(self, ticket: Ticket, prefilled: bool = True) -> None:
        """Takes it out of the ledger; a second release of the same ticket does nothing.

        Args:
            ticket: what :meth:`dispatch` returned.
            prefilled: its prompt is known to be prefilled, and so are those queued before it.
        """
        self._progress.advance(self._clock())
        self._ledger.release(ticket, prefilled)

    def decoded(self, replica: str, predicted: float, actual: float) -> None:
        """A request there took ``actual`` seconds from its first token to its last.

        Args:
            replica: ``ip:port``; one that is no member is passed over.
            predicted: seconds, before any correction.
            actual: seconds.
        """
        row = self._rows.get(replica)
        if row is not None:
            stretch = self._corrections[replica].observe(predicted, actual, self._clock())
            self._replicas["stretch"][row] = stretch

    # -- what policies see ------------------------------------------------------------------

    def view(self, model: str) -> FleetView:
        """The healthy replicas that serve ``model``, as of now.

        Where none says it serves it, every healthy one is in: an adapter may have been loaded
        since the poller asked, and a replica knows best what it does not serve.
        """
        now = self._clock()
        self._progress.advance(now)
        self._progress.refresh()
        candidates = self._find(model)
        rows, replicas, requests = candidates.rows, self._replicas, self._requests
        kv_used, capacity = replicas["kv_used"][rows], replicas["kv_capacity"][rows]
        queued = np.bincount(
            requests["replica"], requests["first_step"] == np.inf, minlength=len(replicas)
        )
        return FleetView(
            rows=rows,
            ids=candidates.ids,
            names=candidates.names,
            requests=(replicas["requests"] + replicas["foreign"])[rows],
            waiting=np.maximum(queued, replicas["polled_waiting"])[rows],
            kv_usage=np.minimum(kv_used / capacity, 1.0),
            backlog=np.maximum(replicas["enqueued"] - replicas["prefilled"], 0.0)[rows],
            batch=replicas["batch"][rows],
            kv_used=kv_used,
            kv_capacity=capacity,
            token_budget=replicas["token_budget"][rows],
            max_num_seqs=replicas["max_num_seqs"][rows],
            costs=StepCosts(*(replicas[name][rows] for name in COSTS)),
            decode_step=replicas["decode_step"][rows],
            stretch=replicas["stretch"][rows],
        )

    def sequences(self, view: FleetView) -> Sequences:
        """What is in flight on the candidates of a view; good until the fleet changes.

        The ledger's sequences and, as one entry a replica, those of others.
        """
        requests, rows = self._requests, view.rows
        weight = requests["weight"]
        context = requests["prompt"] / np.maximum(weight, 1.0) + requests["generated"]
        on, remaining = requests["replica"], requests["remaining"]
        if len(rows) < len(self._replicas):
            candidate = np.full(len(self._replicas), -1, dtype=np.intp)
            candidate[rows] = np.arange(len(rows))
            on = candidate[on]
            keep = on >= 0
            on, weight, context, remaining = on[keep], weight[keep], context[keep], remaining[keep]
        foreign = self._replicas["foreign"][rows]
        theirs = np.flatnonzero(foreign)
        if not len(theirs):
            return Sequences(on, weight, context, remaining)
        kv = np.maximum(self._replicas["kv_beyond"][rows[theirs]], 0.0)
        typical = self.lengths.expected(0, UNBOUNDED)
        return Sequences(
            replica=np.concatenate([on, theirs]),
            weight=np.concatenate([weight, foreign[theirs]]),
            context=np.concatenate([context, kv / foreign[theirs]]),
            remaining=np.concatenate([remaining, np.full(len(theirs), typical)]),
        )

    def _find(self, model: str) -> _Candidates:
        if self.health.changed():
            self._candidates.clear()
        found = self._candidates.get(model)
        if found is None:
            if len(self._candidates) >= _MODELS_REMEMBERED:
                self._candidates.clear()
            found = self._candidates[model] = self._choose_candidates(model)
        return found

    def _choose_candidates(self, model: str) -> _Candidates:
        healthy = [
            row
            for name, row in sorted(self._rows.items(), key=itemgetter(1))
            if self._states[row].healthy and self.health.usable(name)
        ]
        rows = [row for row in healthy if model in self._states[row].models] or healthy
        states = [self._states[row] for row in rows]
        return _Candidates(
            rows=np.array(rows, dtype=np.intp),
            ids=[state.id for state in states],
            names=[state.name or state.id for state in states],
        )


def _seen_by_policies(state: ReplicaState) -> tuple[object, ...]:
    return state.healthy, state.models, state.name

"""Every replica in memory: what polls said, what this router sent, and how far it has come."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extproc.clock import Clock, monotonic, wall
from extproc.fleet.health import Health
from extproc.fleet.state import ReplicaState
from extproc.fleet.table import Table
from extproc.fleet.view import FleetView, Floats, Indices, Sequences, StepCosts
from extproc.predict.hardware import DEFAULT_PROFILE, PROFILES
from extproc.predict.lengths import OutputLengths
from extproc.request.profile import RequestProfile

_STALE = 2.0
"""Seconds without a poll after which what it saw of others' requests no longer counts."""
_TICK = 0.0005
"""Seconds: shorter than any step, so nothing is worth moving forward by less."""
_UNBOUNDED = 131_072.0
"""Tokens a sequence may generate where neither the request nor the model says."""

_REPLICA_COLUMNS: dict[str, type] = {
    "steps": np.float64,  # engine steps, as the replica counts them
    "polled_steps": np.float64,  # the last count a poll gave
    "enqueued": np.float64,  # prompt tokens sent, in all
    "prefilled": np.float64,  # of these, prefilled
    "chunk": np.float64,  # prompt tokens in the prefill step in progress
    "batch": np.float64,  # sequences decoding
    "kv_used": np.float64,
    "foreign": np.float64,  # requests the poll saw beyond the router's own
    "foreign_seen": np.float64,  # the same as the poll before saw it
    "kv_foreign": np.float64,  # KV tokens beyond the router's own estimate; may be negative
    "sampled_at": np.float64,
    "heard_at": np.float64,
    "waiting": np.float64,
    "c0": np.float64,
    "c_prefill": np.float64,
    "c_batch": np.float64,
    "c_kv": np.float64,
    "c_att": np.float64,
    "kv_capacity": np.float64,
    "token_budget": np.float64,
    "max_num_seqs": np.float64,
}

_REQUEST_COLUMNS: dict[str, type] = {
    "replica": np.intp,
    "ticket": np.int64,
    "sent_at": np.float64,
    "prompt": np.float64,  # tokens
    "mark": np.float64,  # its prompt is prefilled once the replica's `prefilled` gets here
    "first_step": np.float64,  # the replica's step count at its first token; NaN before
    "weight": np.float64,  # sequences
    "bound": np.float64,
    "lengths": np.intp,  # row of the output length distribution
}


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in the ledger, from dispatch to release."""

    number: int


class Fleet:
    """The replicas and the ledger of this router's requests on them.

    Between polls the fleet moves itself forward: on each replica the prompts sent are prefilled in
    order, at the speed of its step model, and every step gives each decoding sequence a token. A
    poll corrects the count of steps; the end of a response corrects the prefill.
    """

    def __init__(
        self, lengths: OutputLengths, clock: Clock = monotonic, wall_clock: Clock = wall
    ) -> None:
        self.lengths = lengths
        self.health = Health(clock)
        self._clock = clock
        self._wall = wall_clock
        self._index: dict[str, int] = {}
        self._states: list[ReplicaState] = []
        self._replicas = Table(_REPLICA_COLUMNS)
        self._requests = Table(_REQUEST_COLUMNS)
        self._place: dict[int, int] = {}
        self._tickets = 0
        self._as_of = clock()
        self._weighed = True

    # -- membership and polls ---------------------------------------------------------------

    @property
    def states(self) -> list[ReplicaState]:
        """What the last poll said of each member."""
        return [self._states[index] for index in self._index.values()]

    @property
    def in_flight(self) -> int:
        """Requests in this router's ledger."""
        return len(self._requests)

    def in_flight_on(self, replica: str) -> int:
        """Requests in this router's ledger on that replica."""
        index = self._index.get(replica)
        return 0 if index is None else int((self._requests["replica"] == index).sum())

    def drop_silent(self, after: float) -> None:
        """Removes replicas not heard of for ``after`` seconds while others were.

        When nothing at all is heard, pollers or Redis are gone: the replicas are still there.
        """
        heard = {name: self._replicas["heard_at"][index] for name, index in self._index.items()}
        latest = max(heard.values(), default=0.0)
        for name, at in heard.items():
            if latest - at > after:
                self.remove(name)

    def remove(self, replica: str) -> None:
        """A replica left the pool; its requests in flight stay until they end."""
        self._index.pop(replica, None)
        self.health.forget(replica)

    def put(self, state: ReplicaState) -> None:
        """A poll's news of one replica. Dispatches newer than the scrape are kept on top of it."""
        now = self._clock()
        index = self._index.get(state.id)
        if index is None:
            index = self._join(state)
        elif state.steps < self._states[index].steps:
            self._restarted(index, state)
        self._set_hardware(index, state)
        self._advance(now)
        self._states[index] = state
        self._replicas["heard_at"][index] = now
        if state.healthy:
            self._correct(index, state, now)

    def _join(self, state: ReplicaState) -> int:
        index = self._free_slot()
        if index is None:
            index = self._replicas.append(*([0.0] * len(_REPLICA_COLUMNS)))
            self._states.append(state)
        self._index[state.id] = index
        self._states[index] = state
        for name in _REPLICA_COLUMNS:
            self._replicas[name][index] = 0.0
        self._replicas["chunk"][index] = 1.0
        self._replicas["steps"][index] = self._replicas["polled_steps"][index] = state.steps
        return index

    def _free_slot(self) -> int | None:
        """A departed replica's place, once none of its requests is in flight."""
        taken = set(self._index.values()) | set(self._requests["replica"].tolist())
        return next((slot for slot in range(len(self._replicas)) if slot not in taken), None)

    def _restarted(self, index: int, state: ReplicaState) -> None:
        """The replica's counters begin anew: so does its step count here."""
        back = self._replicas["steps"][index] - state.steps
        mine = self._requests["replica"] == index
        self._requests["first_step"][mine] -= back
        self._replicas["steps"][index] = self._replicas["polled_steps"][index] = state.steps

    def _set_hardware(self, index: int, state: ReplicaState) -> None:
        profile = PROFILES.get(state.profile) or PROFILES[DEFAULT_PROFILE]
        replicas = self._replicas
        for name in ("c0", "c_prefill", "c_batch", "c_kv", "c_att"):
            replicas[name][index] = getattr(profile.step, name)
        replicas["kv_capacity"][index] = state.kv_tokens or profile.kv_tokens
        replicas["token_budget"][index] = profile.token_budget
        # Requests that wait while KV space is left show the replica's own limit.
        limited = state.waiting > 0 and state.kv_usage < 0.9
        limit = min(profile.max_num_seqs, state.running) if limited else profile.max_num_seqs
        replicas["max_num_seqs"][index] = max(limit, 1)

    def _correct(self, index: int, state: ReplicaState, now: float) -> None:
        replicas, requests = self._replicas, self._requests
        age = max(self._wall() - state.scraped_at, 0.0) + state.scrape_seconds / 2
        sampled_at = now - min(age, _STALE)
        mine = requests["replica"] == index
        then = mine & (requests["sent_at"] <= sampled_at)

        ahead = (now - sampled_at) / self._step_times(0.0)[index] if replicas["batch"][index] else 0
        shift = state.steps + ahead - replicas["steps"][index]
        since = mine & (requests["first_step"] > replicas["polled_steps"][index])
        requests["first_step"][since] += shift
        replicas["steps"][index] += shift
        replicas["polled_steps"][index] = state.steps

        # A request that ended between the scrape and now is seen by one poll only, so what two
        # polls in a row saw is somebody else's.
        extra = max(state.running + state.waiting - int(then.sum()), 0)
        replicas["foreign"][index] = min(extra, replicas["foreign_seen"][index])
        replicas["foreign_seen"][index] = extra
        own_kv = float(self._held(then).sum())
        replicas["kv_foreign"][index] = state.kv_usage * replicas["kv_capacity"][index] - own_kv
        replicas["waiting"][index] = max(state.waiting - int(then.sum()), 0)
        replicas["sampled_at"][index] = sampled_at
        self._weighed = False

    # -- the ledger -------------------------------------------------------------------------

    def dispatch(self, replica: str, profile: RequestProfile) -> Ticket:
        """Takes a request into the ledger as sent to ``replica`` now.

        Raises:
            KeyError: the replica is not a member.
        """
        now = self._clock()
        self._advance(now)
        index = self._index[replica]
        self._tickets += 1
        self._place[self._tickets] = self._requests.append(
            index,
            self._tickets,
            now,
            profile.prompt_tokens,
            self._enqueue(index, profile.prompt_tokens),
            np.nan,
            profile.sequences,
            self._bound(profile, index),
            self.lengths.row(profile.model, profile.endpoint),
        )
        return Ticket(self._tickets)

    def move(self, ticket: Ticket, replica: str) -> None:
        """The request was served by another replica than it was sent to (a retry).

        Does nothing where that replica is not a member or already holds it.
        """
        row = self._place[ticket.number]
        index = self._index.get(replica)
        if index is None or self._requests["replica"][row] == index:
            return
        self._advance(self._clock())
        self._dequeue(row)
        self._requests["replica"][row] = index
        self._requests["first_step"][row] = np.nan
        self._weighed = False
        self._requests["mark"][row] = self._enqueue(index, self._requests["prompt"][row])

    def first_token(self, ticket: Ticket) -> None:
        """Its first token was seen: its prompt is prefilled, and all that were queued before it."""
        self._advance(self._clock())
        self._prefilled(self._place[ticket.number])

    def release(self, ticket: Ticket, prefilled: bool = True) -> None:
        """Takes it out of the ledger; a second release of the same ticket does nothing.

        Args:
            ticket: what :meth:`dispatch` returned.
            prefilled: its prompt is known to be prefilled, and so are those queued before it.
        """
        row = self._place.pop(ticket.number, None)
        if row is None:
            return
        self._advance(self._clock())
        if prefilled:
            self._prefilled(row)
        else:
            self._dequeue(row)
        self._weighed = False
        if self._requests.drop(row) != row:
            self._place[int(self._requests["ticket"][row])] = row

    def _enqueue(self, index: int, tokens: float) -> float:
        replicas = self._replicas
        replicas["enqueued"][index] += tokens
        backlog = replicas["enqueued"][index] - replicas["prefilled"][index]
        replicas["chunk"][index] = max(min(backlog, replicas["token_budget"][index]), 1.0)
        return float(replicas["enqueued"][index])

    def _dequeue(self, row: int) -> None:
        """Takes what is not prefilled of its prompt from the replica's backlog."""
        requests, replicas = self._requests, self._replicas
        index, mark = requests["replica"][row], requests["mark"][row]
        unfinished = min(max(mark - replicas["prefilled"][index], 0.0), requests["prompt"][row])
        behind = (requests["replica"] == index) & (requests["mark"] >= mark)
        requests["mark"][behind] -= unfinished
        replicas["enqueued"][index] -= unfinished

    def _prefilled(self, row: int) -> None:
        index = self._requests["replica"][row]
        prefilled = self._replicas["prefilled"]
        prefilled[index] = max(prefilled[index], self._requests["mark"][row])
        self._weighed = False

    def _bound(self, profile: RequestProfile, index: int) -> float:
        if profile.output_bound is not None:
            return profile.output_bound
        context = self._states[index].max_model_len
        return max(context - profile.prompt_tokens, 1) if context else _UNBOUNDED

    # -- moving forward ---------------------------------------------------------------------

    def _step_times(self, prefill: Floats | float) -> Floats:
        times: Floats = self._costs(slice(None)).step_time(
            prefill, self._replicas["batch"], self._replicas["kv_used"]
        )
        return times

    def _advance(self, now: float) -> None:
        """Prefills the backlogs and makes decode steps, from the last time up to ``now``."""
        elapsed = now - self._as_of
        if elapsed < _TICK:
            return
        self._as_of = now
        replicas = self._replicas
        backlog = replicas["enqueued"] - replicas["prefilled"]
        chunk = replicas["chunk"]
        prefill_step = self._step_times(chunk)
        drain = backlog * prefill_step / chunk
        prefilling = np.minimum(elapsed, drain)
        done = prefilling >= drain
        replicas["prefilled"][:] = np.where(
            done, replicas["enqueued"], replicas["prefilled"] + prefilling * chunk / prefill_step
        )
        replicas["steps"][:] += prefilling / prefill_step
        self._start_decoding()
        decoding = np.where(replicas["batch"] > 0, elapsed - prefilling, 0.0)
        replicas["steps"][:] += decoding / self._step_times(0.0)

    def _start_decoding(self) -> None:
        requests, replicas = self._requests, self._replicas
        index = requests["replica"]
        starts = np.isnan(requests["first_step"]) & (
            requests["mark"] <= replicas["prefilled"][index] + 1e-6
        )
        requests["first_step"][starts] = replicas["steps"][index[starts]]
        self._weigh()

    def _weigh(self) -> None:
        """Batch and KV tokens per replica, from the ledger and what the poll saw beyond it."""
        self._weighed = True
        requests, replicas = self._requests, self._replicas
        decoding = ~np.isnan(requests["first_step"])
        replicas["batch"][:] = replicas["foreign"] + np.bincount(
            requests["replica"], requests["weight"] * decoding, minlength=len(replicas)
        )
        held = np.bincount(requests["replica"], self._held(slice(None)), minlength=len(replicas))
        replicas["kv_used"][:] = np.maximum(held + replicas["kv_foreign"], 0.0)

    def _generated(self, rows: NDArray[np.bool_] | slice) -> Floats:
        """Tokens per sequence so far: every step since its first token gave it one."""
        requests = self._requests
        steps = self._replicas["steps"][requests["replica"][rows]]
        done: Floats = np.clip(steps - requests["first_step"][rows] + 1.0, 0.0, None)
        generated: Floats = np.minimum(np.nan_to_num(done), requests["bound"][rows])
        return generated

    def _held(self, rows: NDArray[np.bool_] | slice) -> Floats:
        """KV tokens its sequences hold; prompts in the queue hold none yet."""
        requests = self._requests
        started = ~np.isnan(requests["first_step"][rows])
        generated = self._generated(rows) * requests["weight"][rows]
        held: Floats = np.where(started, requests["prompt"][rows] + generated, 0.0)
        return held

    # -- what policies see ------------------------------------------------------------------

    def view(self, model: str) -> FleetView:
        """The healthy replicas that serve ``model``, as of now.

        Where none says it serves it, every healthy one is in: an adapter may have been loaded
        since the poller asked, and a replica knows best what it does not serve.
        """
        self._advance(self._clock())
        if not self._weighed:
            self._start_decoding()
        members = self._candidates(model)
        replicas = self._replicas
        sequences = self._sequences(members)
        kv_used, capacity = replicas["kv_used"][members], replicas["kv_capacity"][members]
        own = np.bincount(self._requests["replica"], minlength=len(replicas))
        queued = np.bincount(
            self._requests["replica"],
            np.isnan(self._requests["first_step"]),
            minlength=len(replicas),
        )
        return FleetView(
            ids=[self._states[index].id for index in members],
            names=[self._states[index].name or self._states[index].id for index in members],
            requests=own[members] + replicas["foreign"][members],
            waiting=queued[members] + replicas["waiting"][members],
            kv_usage=np.minimum(kv_used / capacity, 1.0),
            backlog=np.maximum(replicas["enqueued"] - replicas["prefilled"], 0.0)[members],
            batch=replicas["batch"][members],
            kv_used=kv_used,
            kv_capacity=capacity,
            token_budget=replicas["token_budget"][members],
            max_num_seqs=replicas["max_num_seqs"][members],
            costs=self._costs(members),
            sequences=sequences,
        )

    def _candidates(self, model: str) -> Indices:
        healthy = [
            index
            for name, index in self._index.items()
            if self._states[index].healthy and self.health.usable(name)
        ]
        serving = [index for index in healthy if model in self._states[index].models]
        return np.array(serving or healthy, dtype=np.intp)

    def _costs(self, members: Indices | slice) -> StepCosts:
        replicas = self._replicas
        return StepCosts(
            *(replicas[name][members] for name in ("c0", "c_prefill", "c_batch", "c_kv", "c_att"))
        )

    def _sequences(self, members: Indices) -> Sequences:
        """The ledger's sequences and, as one entry a replica, those of others."""
        requests, replicas = self._requests, self._replicas
        candidate = np.full(len(replicas), -1, dtype=np.intp)
        candidate[members] = np.arange(len(members))
        on = candidate[requests["replica"]]
        generated = self._generated(slice(None))
        remaining = self.lengths.remaining(requests["lengths"], generated, requests["bound"])
        each = np.maximum(requests["weight"], 1.0)
        keep = on >= 0
        fresh = self._clock() - replicas["sampled_at"][members] < _STALE
        foreign = np.where(fresh, replicas["foreign"][members], 0.0)
        context = np.maximum(replicas["kv_foreign"][members], 0.0) / np.maximum(foreign, 1.0)
        theirs = self.lengths.remaining(0, 0.0, np.full(len(members), _UNBOUNDED))
        return Sequences(
            replica=np.concatenate([on[keep], np.arange(len(members))]),
            weight=np.concatenate([requests["weight"][keep], foreign]),
            context=np.concatenate([(requests["prompt"] / each + generated)[keep], context]),
            remaining=np.concatenate([remaining[keep], theirs]),
        )

"""Every replica in memory: what polls said, what this router sent, and how far it has come."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from uuid import uuid4

import numpy as np

from extproc.clock import Clock, monotonic, wall
from extproc.fleet import sent
from extproc.fleet.adapters import Adapters
from extproc.fleet.alone import Alone, Before, Served
from extproc.fleet.digest import Digest, Kind
from extproc.fleet.digest_source import DigestSource
from extproc.fleet.eligibility import Eligibility
from extproc.fleet.held_blocks import HeldBlocks
from extproc.fleet.holders import Holders
from extproc.fleet.ledger import Ledger, Ticket
from extproc.fleet.names import ModelNames
from extproc.fleet.newcomers import favour_idle
from extproc.fleet.others import Others
from extproc.fleet.polls import correct, restart, set_hardware
from extproc.fleet.prefixes import Held, Prefixes
from extproc.fleet.progress import Progress
from extproc.fleet.sent import SentPrompts
from extproc.fleet.tables import IN_VIEW, SEEN, Replicas, Requests
from extproc.predict.adapter import AdapterTimes
from extproc.predict.correction import Corrections
from extproc.predict.inputs import Excluded, FleetView, Indices, Sequences, StepCosts
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState
from extproc.request.prefix import NO_PREFIX, Prefix
from extproc.request.profile import RequestProfile

_MODELS_REMEMBERED = 64
_UNBOUNDED = 131_072.0
"""Tokens that a sequence which only polls saw may generate."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The replicas that may serve a model; they change seldom."""

    rows: Indices
    ids: list[str]
    names: list[str]
    excluded: tuple[Excluded, ...]


class Fleet:
    """The replicas of a pool, this router's requests on them, and what others tell of theirs.

    Between polls the fleet moves itself forward (:class:`~extproc.fleet.progress.Progress`). A poll
    corrects the count of steps, and what is prefilled.
    """

    def __init__(
        self,
        lengths: OutputLengths,
        clock: Clock = monotonic,
        wall: Clock = wall,
        names: ModelNames | None = None,
    ) -> None:
        """An empty one; ``names`` are those under which clients ask for what replicas serve."""
        self.router = uuid4().hex[:16]
        """Names this router among others, from its start to its end."""
        self.lengths = lengths
        self.names = names or ModelNames()
        self.eligibility = Eligibility(clock, self.names)
        self.responses = Holders()
        self.sessions = Holders()
        self.sent = SentPrompts()
        self.known = asyncio.Event()
        """Set when the replicas that there were at the start were put in."""
        self._prefixes = Prefixes()
        self.blocks = HeldBlocks(clock)
        self._clock = clock
        self._rows: dict[str, int] = {}
        self._states: list[ReplicaState] = []
        """By row of the table; those of replicas that left stay until the row is used again."""
        self._replicas = Replicas()
        self._requests = Requests()
        self.others = Others(self.router, self._replicas, self._rows, clock, wall)
        self._progress = Progress(self._replicas, self._requests, self.others, lengths, clock())
        self._corrections = Corrections(clock())
        self.digests = DigestSource(
            self.router,
            self._replicas,
            self._requests,
            self._progress,
            self._corrections,
            self._states,
            wall,
        )
        self._ledger = Ledger(self._replicas, self._requests, self._progress, lengths)
        self._candidates: dict[tuple[str, frozenset[str] | None], _Candidates] = {}
        self._alone = Alone(self._replicas)
        self._adapters = Adapters(self._requests)

    # -- membership and polls ---------------------------------------------------------------

    @property
    def heard_at(self) -> float:
        """When the last news of any replica came, on the fleet's clock; at first, its start."""
        return self.eligibility.news.latest

    @property
    def states(self) -> list[ReplicaState]:
        """What the last poll said of each member."""
        return [self._states[row] for row in self._rows.values()]

    def __contains__(self, replica: object) -> bool:
        """Whether it is a member, by its ``ip:port``."""
        return replica in self._rows

    @property
    def only_model(self) -> str | None:
        """The model that members serve, where all that say serve the same; else None."""
        served = {state.models for state in self.states if state.models}
        names = served.pop() if len(served) == 1 else ()
        return names[0] if names else None

    def models_on(self, replica: str) -> tuple[str, ...]:
        """Names of models that a replica serves; none where it does not tell, or is no member."""
        row = self._rows.get(replica)
        return () if row is None else self._states[row].models

    def name_on(self, replica: str, model: str) -> str:
        """The name by which a replica is asked for a model."""
        known = self.names.known(model, self.models_on(replica))
        return known or self.names.served(model)[0]

    @property
    def models(self) -> list[str]:
        """Names of models that clients may ask for."""
        kinds = {state.models for state in self.states}
        return self.names.askable(name for models in kinds for name in models)

    def all_serve(self, name: str) -> bool:
        """Whether every member says that it serves a model by that name."""
        return all(name in state.models for state in self.states)

    def can_serve(self, model: str, among: frozenset[str] | None = None) -> bool:
        """Whether a replica that says it serves the model may be used; of those ``among`` a few, if
        given."""
        usable = self._find(model, among).ids
        return any(self.names.known(model, self.models_on(one)) for one in usable)

    def put(self, state: ReplicaState, age: float = 0.0) -> None:
        """A poll's news of one replica; a new one joins. Dispatches newer than it stay on top.

        Args:
            state: what the poll saw.
            age: seconds since then, on the way here.
        """
        now = self._clock()
        self._progress.advance(now)
        self.eligibility.heard(state)
        self.blocks.polled(state)
        before = self._states[self._rows[state.id]] if state.id in self._rows else None
        row = self._join(state) if before is None else self._rows[state.id]
        self._states[row] = state
        self._learn_lengths(state, before)
        asked_at = now - age - state.scrape_seconds
        if state.healthy:
            self._alone.polled(row, state, asked_at, now)
        set_hardware(self._replicas, row, state, before, self._alone.step(row, state, now))
        if state.healthy:
            if state.steps < self._replicas.polled_steps[row]:
                restart(self._replicas, self._requests, row, state.steps)
                self._prefixes.clear(row)
                self.sent.emptied(state.id)
                self._adapters.restarted(row)
            self._prefixes.polled(row, state)
            self._adapters.polled(row, state, asked_at)
            mine = correct(self._replicas, self._requests, row, state, asked_at, now)
            self._progress.corrected(row, mine)

    def _learn_lengths(self, state: ReplicaState, before: ReplicaState | None) -> None:
        """From the replica's own histogram: what was added since the last poll."""
        if state.output_lengths == (before.output_lengths if before else ()) or not state.models:
            return
        known = dict(before.output_lengths) if before and before.steps <= state.steps else {}
        counts = [(edge, max(n - known.get(edge, 0.0), 0.0)) for edge, n in state.output_lengths]
        self.lengths.observe_counts(state.models[0], counts)

    def remove(self, replica: str) -> None:
        """A replica left the pool; its requests in flight stay until they end."""
        self._rows.pop(replica, None)
        self.eligibility.forget(replica)
        self.blocks.forget(replica)

    def drop_silent(self, after: float) -> None:
        """Removes replicas not heard of for ``after`` seconds in which others were, routers that
        are gone, and blocks of replicas that are none of the members.

        When nothing at all is heard, pollers or Redis are gone: the replicas are still there.
        """
        if self.others.look(self._clock()):
            self._progress.changed()
        for name in self.eligibility.news.silent(after):
            self.remove(name)
        if self.known.is_set():
            self.blocks.keep(self)

    def _join(self, state: ReplicaState) -> int:
        """A row for a replica: the one it had, so that its requests are still on it; else one that
        nobody uses; else a new one."""
        departed = [row for row, known in enumerate(self._states) if known.id == state.id]
        if departed:
            row = self._rows[state.id] = departed[0]
            self._corrections.reset(row)
            return row
        taken = set(self._rows.values()) | set(self._requests.replica.tolist())
        free = [row for row in range(len(self._replicas)) if row not in taken]
        if free:
            row = free[0]
        else:
            row = self._replicas.append()
            self._states.append(state)
        self._replicas.write(
            row,
            steps=state.steps,
            polled_steps=state.steps,
            polled_firsts=state.first_tokens,
            chunk=1.0,
            stretch=1.0,
            sampled_at=inf,
        )
        self.others.clear(row)
        self._corrections.reset(row)
        self._alone.forget(row)
        self._prefixes.clear(row)
        self._adapters.forget(row)
        step = self._alone.step(row, state, self._clock())
        set_hardware(self._replicas, row, state, None, step)
        self._replicas.decode_step[row] = self._replicas.c0[row]
        self._rows[state.id] = row
        return row

    # -- this router's requests -------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests in this router's ledger."""
        return len(self._ledger)

    def in_flight_on(self, replica: str) -> int:
        """Requests in this router's ledger on that replica."""
        row = self._rows.get(replica)
        return 0 if row is None else int(self._replicas.requests[row])

    def dispatch(self, replica: str, profile: RequestProfile, cached: float = 0.0) -> Ticket:
        """Takes a request into the ledger as sent to ``replica`` now.

        Args:
            replica: ``ip:port``.
            profile: the request.
            cached: tokens of its prompt that the replica has in its prefix cache.

        Raises:
            KeyError: the replica is not a member.
        """
        row = self._rows[replica]
        self.eligibility.sent(replica)
        now = self._clock()
        self._progress.advance(now)
        ticket = self._ledger.take(row, profile, now, cached)
        self._enter(row, profile.prefix)
        [adapter] = self._adapters_on([replica], profile.model) or ("",)
        self.blocks.sent(replica, profile.prefix, adapter)
        self.sent.add(replica, profile.prefix)
        self._alone.sent(row, ticket.number, profile, self._states[row])
        self._adapters.sent(row, ticket.number, adapter, now)
        return ticket

    def move(self, ticket: Ticket, replica: str, prefix: Prefix = NO_PREFIX) -> None:
        """The request was served by another replica than it was sent to (a retry).

        Does nothing where that replica is not a member.
        """
        row = self._rows.get(replica)
        if row is not None:
            self._progress.advance(self._clock())
            self._alone.moved(self._ledger.replica(ticket), ticket.number, row)
            cached = self._prefixes.held(prefix, np.array([row])).cached.item()
            self._ledger.move(ticket, row, cached)
            self._adapters.moved(ticket.number, row, self._clock())
            self._enter(row, prefix)
            self.sent.add(replica, prefix)

    def first_token(self, ticket: Ticket) -> None:
        """Its first token was seen: its prompt is prefilled, and all that were queued before it."""
        self._progress.advance(self._clock())
        self._ledger.first_token(ticket)

    def release(self, ticket: Ticket, prefilled: bool = True) -> Before | None:
        """Takes it out of the ledger; a second release of the same ticket does nothing.

        Args:
            ticket: what :meth:`dispatch` returned.
            prefilled: its prompt is known to be prefilled, and so are those queued before it.

        Returns:
            What was counted of its replica before it, where it may have been alone there; for
            :meth:`served_alone`.
        """
        self._progress.advance(self._clock())
        row = self._ledger.release(ticket, prefilled)
        if row is None:
            return None
        self._adapters.ended(ticket.number, self._clock())
        self.eligibility.ended(self._states[row].id)
        return self._alone.left(row, ticket.number)

    def teaches(self, ticket: Ticket) -> bool:
        """Whether it is alone on a replica whose speed is not known yet."""
        row = self._ledger.replica(ticket)
        return self._alone.is_alone(row, ticket.number) and not self._alone.sure(row, self._clock())

    def served_alone(self, replica: str, before: Before, served: Served) -> None:
        """What became of a request that may have been alone there; the next poll tells if it was.

        Args:
            replica: ``ip:port``; one that is no member is passed over.
            before: from :meth:`release`.
            served: the request.
        """
        row = self._rows.get(replica)
        if row is not None:
            self._alone.served(row, before, served, self._clock())

    def decoded(self, replica: str, predicted: float, actual: float) -> None:
        """A request there took ``actual`` seconds from its first token to its last.

        Args:
            replica: ``ip:port``; one that is no member is passed over.
            predicted: seconds, before any correction.
            actual: seconds.
        """
        row = self._rows.get(replica)
        if row is not None:
            self._corrections.observe(row, predicted, actual, self._clock())

    def reported(
        self, replica: str, expected: float, depth: int, prompt: float, tokens: float
    ) -> None:
        """A request there found ``tokens`` of its ``prompt`` tokens cached.

        Args:
            replica: ``ip:port``; one that is no member is passed over.
            expected: tokens that the replica should have held.
            depth: and how deep, both of :meth:`held`.
            prompt: its tokens.
            tokens: as it said.
        """
        row = self._rows.get(replica)
        if row is not None and depth >= 0:
            self._prefixes.reported(row, expected, depth, prompt, tokens)

    def adapter_loaded(self, replica: str, seconds: float) -> None:
        """A request there, whose adapter was to be loaded, got its first token so much later."""
        row = self._rows.get(replica)
        if row is not None:
            self._adapters.took(row, seconds)

    def adapter_waited(self, overrun: float) -> None:
        """A request waited for a place of its adapter so many times as long as for what had come
        before it."""
        self._adapters.waited(overrun)

    def failed(self, replica: str) -> None:
        """A request sent there was answered with a 5xx, or had to be served by another."""
        self.eligibility.failed(replica)

    def answered(self, replica: str) -> None:
        """A request sent there was answered."""
        self.eligibility.answered(replica)

    def holder(self, response: str) -> str | None:
        """The replica that holds a stored response; None where that is not known, or no request
        may be sent there now. One that drains still answers for what it holds."""
        replica = self.responses.holder(response) or ""
        return replica if self.eligibility.works(replica) else None

    def bind(self, session: str, replica: str) -> None:
        """A request of that session went there; empty: it has none."""
        if not session:
            return
        if self.sessions.holder(session) == replica:
            self.sessions.keep(session, replica)
        else:
            self.sessions.saw(session, replica)

    # -- what other routers tell ------------------------------------------------------------

    def hear(self, digest: Digest, age: float = 0.0) -> None:
        """A router's digest came, that Redis has had for ``age`` seconds."""
        # Its own come back to it, too, and tell nothing but how long they took.
        told = digest.replicas or digest.kind is not Kind.CHANGES
        if told and digest.router != self.router:
            self._progress.advance(self._clock())
            self._progress.changed()
        self.others.hear(digest, age)

    def hear_prompts(self, router: str, prompts: bytes) -> None:
        """A router sent these prompts, by its :attr:`sent`.

        Raises:
            ValueError: they cannot be read.
        """
        if router == self.router:
            return
        for replica, prefix in sent.read(prompts):
            if (row := self._rows.get(replica)) is None:
                continue
            if prefix.tokens:
                self._enter(row, prefix)
            else:
                self._prefixes.clear(row)

    def _enter(self, row: int, prefix: Prefix) -> None:
        if self._states[row].prefix_caching:
            self._prefixes.enter(row, prefix, self._replicas.kv_capacity.item(row))

    # -- what policies see ------------------------------------------------------------------

    def view(self, model: str, among: frozenset[str] | None = None) -> FleetView:
        """The replicas that may serve ``model``, as of now; of those ``among`` a few, if given."""
        now = self._clock()
        if self.others.look(now):
            self._progress.changed()
        self._progress.advance(now)
        self._progress.refresh()
        if self._corrections.due(now):
            self._replicas.stretch[:] = self._corrections.ratios(now, self.others.decoded)
        candidates = self._find(model, among)
        newcomers = self.eligibility.newcomers
        if newcomers:
            candidates = self._without_full(candidates)
        replicas, rows = self._replicas.first(IN_VIEW), candidates.rows
        all_are = len(rows) == len(self._replicas)
        (
            requests,
            queued,
            enqueued,
            prefilled,
            foreign,
            foreign_backlog,
            polled_waiting,
            polled_kv_usage,
            batch,
            kv_used,
            kv_capacity,
            token_budget,
            max_num_seqs,
            longest_prompt,
            decode_step,
            tokens_per_step,
            stretch,
            *costs,
        ) = replicas.copy() if all_are else replicas.take(rows, axis=1)
        if self.others.counted:
            theirs = self._replicas.others
            theirs = theirs if all_are else theirs.take(rows, axis=1)
            requests += theirs[0]
            queued += theirs[1]
            enqueued += theirs[3]
        view = FleetView(
            rows,
            candidates.ids,
            candidates.names,
            requests + foreign,
            np.maximum(queued, polled_waiting),
            polled_waiting,
            polled_kv_usage,
            enqueued - prefilled + foreign_backlog,
            batch,
            kv_used,
            kv_capacity,
            token_budget,
            max_num_seqs,
            longest_prompt,
            StepCosts(*costs),
            decode_step,
            tokens_per_step,
            stretch,
            candidates.excluded,
            self._adapters_on(candidates.ids, model),
        )
        if newcomers:
            favour_idle(view, newcomers)
        return view

    def held(self, prefix: Prefix, view: FleetView) -> Held:
        """What the candidates of a view hold of a prompt in their prefix caches: by their own word,
        or what they should by what was sent."""
        held = self._prefixes.held(prefix, view.rows)
        told = self.blocks.held(prefix, view.adapters, view.ids)
        if told is None:
            return held
        estimated = np.isnan(told)
        return Held(
            np.where(estimated, held.expected, told),
            np.where(estimated, held.depths, -1),
            np.where(estimated, held.cached, told),
        )

    def sequences(self, view: FleetView) -> Sequences:
        """What is in flight on the candidates of a view; good until the fleet changes.

        The ledger's sequences, those other routers tell of, and those only polls saw, as one entry
        a replica.
        """
        self._progress.look_ahead()
        on, figures, rows = self._requests.replica, self._requests.first(SEEN), view.rows
        if self.others.counted:
            on, figures = self.others.beside(on, figures)
        if len(rows) < len(self._replicas):
            candidate = np.full(len(self._replicas), -1, dtype=np.intp)
            candidate[rows] = np.arange(len(rows))
            on = candidate[on]
            keep = (on >= 0).nonzero()[0]
            on, figures = on[keep], figures.take(keep, axis=1)
        foreign = self._replicas.foreign[rows]
        theirs = foreign.nonzero()[0]
        if len(theirs):
            others = np.empty((SEEN, len(theirs)))
            others[0] = foreign = foreign[theirs]
            others[1] = np.maximum(self._replicas.kv_beyond[rows[theirs]], 0.0) / foreign
            others[2] = self.lengths.expected(0, _UNBOUNDED)
            on = np.concatenate([on, theirs])
            figures = np.concatenate([figures, others], axis=1)
        return Sequences(on, *figures)

    def adapter_times(self, view: FleetView) -> AdapterTimes | None:
        """What a request for a LoRA adapter meets on the candidates of a view; None where the model
        is none. Call :meth:`sequences` before."""
        if not any(view.adapters):
            return None
        typical = self.lengths.expected(0, _UNBOUNDED)
        return self._adapters.times(view, typical, self._clock())

    def _adapters_on(self, replicas: Sequence[str], model: str) -> Sequence[str]:
        """As :attr:`FleetView.adapters` of these replicas."""
        adapters = self._adapters
        if not adapters or not any(name in adapters for name in self.names.served(model)):
            return ()
        names = (self.name_on(replica, model) for replica in replicas)
        return [name if name in adapters else "" for name in names]

    def _find(self, model: str, among: frozenset[str] | None) -> _Candidates:
        if self.eligibility.changed():
            self._candidates.clear()
        found = self._candidates.get((model, among))
        if found is None:
            if len(self._candidates) >= _MODELS_REMEMBERED:
                self._candidates.clear()
            found = self._choose_candidates(model, among)
            self._candidates[model, among] = found
        return found

    def _choose_candidates(self, model: str, among: frozenset[str] | None) -> _Candidates:
        rows = self._rows
        members = rows if among is None else rows.keys() & among
        return self._candidates_of(*self.eligibility.admit(members, model))

    def _candidates_of(self, usable: Iterable[str], left_out: Mapping[str, str]) -> _Candidates:
        rows = sorted(self._rows[name] for name in usable)
        states = [self._states[row] for row in rows]
        excluded = [
            (self._states[row], left_out[name])
            for row, name in sorted((self._rows[name], name) for name in left_out)
        ]
        return _Candidates(
            rows=np.array(rows, dtype=np.intp),
            ids=[state.id for state in states],
            names=[state.name or state.id for state in states],
            excluded=tuple(Excluded(one.id, one.name or one.id, why) for one, why in excluded),
        )

    def _without_full(self, candidates: _Candidates) -> _Candidates:
        """Without newcomers that may have no more requests for now, unless that is all of them."""
        requests = self._replicas.requests + self._replicas.foreign
        if self.others.counted:
            requests += self._replicas.others_requests
        found = (
            (name, self.eligibility.too_much(name, requests[row]))
            for name, row in zip(candidates.ids, candidates.rows.tolist(), strict=True)
        )
        full = {name: why for name, why in found if why}
        if not full or len(full) == len(candidates.ids):
            return candidates
        left = [name for name in candidates.ids if name not in full]
        admitted = self._candidates_of(left, full)
        return replace(admitted, excluded=candidates.excluded + admitted.excluded)

"""Every replica in memory: what polls said, what this router sent, and how far it has come."""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from extproc.fleet.adapters import AdapterSlots
from extproc.fleet.announcements import OwnerMap, PromptLog, read_prompts
from extproc.fleet.digest import DECODED, EXPECTED, Digest
from extproc.fleet.digest_source import DigestSource
from extproc.fleet.eligibility import Eligibility
from extproc.fleet.held_blocks import HeldBlocks
from extproc.fleet.ledger import Ledger, Ticket
from extproc.fleet.members import Members, ModelNames
from extproc.fleet.peers import Peers
from extproc.fleet.prefix_index import PrefixHits, PrefixIndex
from extproc.fleet.progress import Progress
from extproc.fleet.reconcile import Reconciliation
from extproc.fleet.tables import SEEN, Replicas, Requests
from extproc.ground.clock import Clock, monotonic, wall
from extproc.predict.completion import AdapterTimes
from extproc.predict.correction import Corrections, FirstTokens
from extproc.predict.inputs import (
    Candidates,
    Columns,
    FleetView,
    Floats,
    Indices,
    Sequences,
    most,
    usual_step,
)
from extproc.predict.lengths import OutputLengths
from extproc.predict.step import profile_or_default
from extproc.replica_state import ReplicaState
from extproc.request.prefix import NO_PREFIX, Prefix
from extproc.request.profile import RequestProfile

_IN_VIEW = len(Columns.__annotations__)
_UNBOUNDED = 131_072.0  # tokens that a sequence which only polls saw may generate


class Ended(NamedTuple):
    """What the fleet knows of a request that is over."""

    tokens: float
    """Of each of its sequences, by the steps that its replica counts; 0 where these were not heard
    of lately."""
    seconds: float  # since the first of them


class Fleet:
    """The replicas of a pool, this router's requests on them, and what others tell of theirs.

    What several parts must hear of, in an order that matters, is a method here: a poll, a request
    that is sent, moves or ends, a digest; so is what policies see, which is made of several. What
    concerns one part alone is said to that part, or asked of it. Between polls the fleet moves
    itself forward (:class:`~extproc.fleet.progress.Progress`). A poll corrects the count of steps,
    and what is prefilled.
    """

    def __init__(
        self,
        lengths: OutputLengths,
        clock: Clock = monotonic,
        wall: Clock = wall,
        names: ModelNames | None = None,
    ) -> None:
        """An empty one; ``names`` are those under which clients ask for what replicas serve."""
        self.router = uuid4().hex[:16]  # names this router among others, from its start to its end
        self.members_known = asyncio.Event()  # set once the replicas of the start were put in
        self.pollers: Sequence[str] | None = None  # names of those alive; None: not known
        self._clock = clock
        self._replicas = replicas = Replicas()
        self._requests = requests = Requests()
        self.lengths = lengths
        self.members = Members(names or ModelNames())
        self._rows = rows = self.members.rows
        self.eligibility = Eligibility(clock, self.members.names, rows)
        self.responses = OwnerMap()
        self.sessions = OwnerMap()
        self.prompt_log = PromptLog()
        self.blocks = HeldBlocks(clock)
        self.peers = Peers(self.router, replicas, rows, clock, wall)
        self._prefixes = PrefixIndex()
        self._corrections = Corrections(clock())
        self.first_tokens = FirstTokens()
        self._progress = Progress(replicas, requests, self.peers, lengths, clock())
        self._ledger = Ledger(replicas, requests, self._progress, lengths)
        self.adapters = AdapterSlots(replicas, rows, self._ledger, lengths)
        self._reconciliation = Reconciliation(replicas, requests, self.peers)
        self.digests = DigestSource(
            self.router,
            replicas,
            requests,
            self._progress,
            self._corrections,
            self.members.by_row,
            wall,
        )

    # -- membership and polls ---------------------------------------------------------------

    def put(self, state: ReplicaState, age: float = 0.0) -> None:
        """A poll's news of one replica; a new one joins. Dispatches newer than it stay on top.

        Args:
            state: what the poll saw.
            age: seconds since then, on the way here.
        """
        now = self._clock()
        asked_at = now - age - state.scrape_seconds
        self._progress.advance(now)
        before = self.members.get(state.id)
        self.eligibility.heard(state, age, before is not None and self._is_idle(state.id))
        if self.eligibility.frozen(state.id):
            state = structs.replace(state, running=0, waiting=0, kv_usage=0.0)
        self.blocks.polled(state)
        row = self._join(state) if before is None else self._rows[state.id]
        self.members.by_row[row] = state
        if before is not None and before.models != state.models:
            self.members.models_removed(before.models, now, state.models)
        self._learn_lengths(state, before)
        of_now = before is None or state.scraped_at != before.scraped_at  # or told again
        started_at = before.started_at if before else 0.0  # of its process; 0: not known
        fell = state.steps < self._replicas.polled_steps[row]
        older = fell and 0.0 < started_at == state.started_at  # another poller's
        fresh = of_now and state.healthy and not state.unanswered_s and not older
        known = usual_step(self._replicas, row)
        step = state.learned or profile_or_default(state.profile).step
        self._reconciliation.set_hardware(row, state, step)
        self._corrections.slowed(row, self._slower(row, known))
        self._replicas.tells[row] = state.kv_tokens > 0 and state.measured
        if not fresh:
            return
        if fell or started_at not in (0.0, state.started_at):
            self._reconciliation.restarted(row, state.steps)
            self._prefixes.clear(row)
            self.prompt_log.restarted(state.id)
            self.adapters.clear(row)
        self._prefixes.polled(row, state)
        self.adapters.polled(row, state, asked_at, now)
        self._progress.corrected(row, self._reconciliation.polled(row, state, asked_at, now))

    def _is_idle(self, replica: str) -> bool:
        """Return True if no router is known to have a request on a replica."""
        row = self._rows[replica]
        return not self._replicas.requests.item(row) + self._replicas.peers_requests.item(row)

    def _learn_lengths(self, state: ReplicaState, before: ReplicaState | None) -> None:
        """From the replica's own histogram: what was added since the last poll."""
        if state.output_lengths == (before.output_lengths if before else ()) or not state.models:
            return
        known = dict(before.output_lengths) if before and before.steps <= state.steps else {}
        counts = [(edge, max(n - known.get(edge, 0.0), 0.0)) for edge, n in state.output_lengths]
        self.lengths.observe_counts(state.models[0], counts)

    def remove(self, replica: str) -> None:
        """A replica left the pool; its requests in flight stay until they end."""
        self.members.models_removed(self.members.models_on(replica), self._clock())
        self._rows.pop(replica, None)
        self.eligibility.forget(replica)
        self.blocks.forget(replica)

    def drop_stale(self, after: float) -> None:
        """Removes replicas not heard of for ``after`` seconds in which others were, routers that
        are gone, and blocks of replicas that are none of the members.

        When nothing at all is heard, pollers or Redis are gone: the replicas are still there.
        """
        if self.peers.refresh(self._clock()):
            self._progress.changed()
        for name in self.eligibility.staleness.stale(after):
            self.remove(name)
        if self.members_known.is_set():
            self.blocks.keep(self.members)

    def _join(self, state: ReplicaState) -> int:
        """A row for a replica: the one it had, so that its requests are still on it; else one that
        nobody uses; else a new one."""
        row = self.members.departed(state.id)
        if row is None:
            taken = {*self._rows.values(), *self._requests.replica.tolist()}
            row = next((row for row in range(len(self._replicas)) if row not in taken), None)
            if row is None:
                row = self._replicas.append()
                self.members.by_row.append(state)
            self._replicas.write(
                row,
                steps=state.steps,
                polled_steps=state.steps,
                polled_firsts=state.first_tokens,
                chunk=1.0,
                stretch=1.0,
                sampled_at=inf,
            )
            for part in (self.peers, self._prefixes, self.adapters):
                part.clear(row)
        self._corrections.clear(row)
        self._rows[state.id] = row
        return row

    # -- this router's requests -------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds on the fleet's clock."""
        return self._clock()

    @property
    def in_flight(self) -> int:
        return len(self._ledger)

    def in_flight_on(self, replica: str) -> int:
        row = self._rows.get(replica)
        return 0 if row is None else int(self._replicas.requests[row])

    def dispatch(
        self,
        replica: str,
        profile: RequestProfile,
        cached: float = 0.0,
        response_visible: bool = True,
    ) -> Ticket:
        """Takes a request into the ledger as sent to ``replica`` now.

        Args:
            replica: ``ip:port``.
            profile: the request.
            cached: tokens of its prompt that the replica has in its prefix cache.
            told: Envoy tells of its response.

        Raises:
            KeyError: the replica is not a member.
        """
        row, now = self._rows[replica], self._clock()
        self.eligibility.sent(replica, response_visible)
        self._progress.advance(now)
        ticket = self._ledger.enter(row, profile, now, cached)
        self._remember(row, profile.prefix)
        adapter = self.eligibility.adapter(replica, profile.model)
        self.blocks.sent(replica, profile.prefix, adapter)
        self.prompt_log.add(replica, profile.prefix)
        self.adapters.sent(row, ticket, adapter, now)
        return ticket

    def move(self, ticket: Ticket, replica: str, prefix: Prefix = NO_PREFIX) -> None:
        """The request was served by another replica than it was sent to (a retry).

        Does nothing where that replica is not a member.
        """
        row, now = self._rows.get(replica), self._clock()
        if row is not None:
            self._progress.advance(now)
            cached = self._prefixes.hits(prefix, np.array([row])).cached.item()
            self._ledger.move(ticket, row, cached)
            self.adapters.moved(ticket, row, now)
            self._remember(row, prefix)
            self.prompt_log.add(replica, prefix)

    def first_token(self, ticket: Ticket) -> None:
        """Its first token was seen: its prompt is prefilled, and all that were queued before it."""
        self._progress.advance(self._clock())
        self._ledger.first_token(ticket)

    def release(self, ticket: Ticket, prefilled: bool = True) -> Ended:
        """Takes it out of the ledger.

        Args:
            ticket: what :meth:`dispatch` returned.
            prefilled: its prompt is known to be prefilled, and so are those queued before it.

        Raises:
            KeyError: it was released.
        """
        now = self._clock()
        self._progress.advance(now)
        generated = self._ledger.generated(ticket, now)
        row = self._ledger.release(ticket, prefilled)
        self.adapters.ended(ticket, now)
        self.eligibility.ended(self.members.by_row[row].id)
        return Ended(*generated)

    def decoded(self, replica: str, predicted: float, actual: float, step: float = 0.0) -> None:
        """A request there took ``actual`` seconds from its first token to its last, and
        ``predicted`` ones by a prediction that was not corrected, when a usual step was thought to
        take ``step`` seconds; 0: as is thought now."""
        if (row := self._rows.get(replica)) is not None:
            slower = self._slower(row, step)
            self._corrections.observe(row, predicted, actual, self._clock(), slower)

    def _slower(self, row: int, step: float) -> float:
        """How many times as long as ``step`` a usual step takes by what is known now."""
        return usual_step(self._replicas, row) / step if step else 1.0

    def reported(
        self, replica: str, expected: float, depth: int, prompt: float, tokens: float
    ) -> None:
        """A request there found ``tokens`` of its ``prompt`` tokens cached, where so many were
        ``expected`` so ``depth`` in the cache, both as :meth:`held` said."""
        row = self._rows.get(replica)
        if row is not None and depth >= 0:
            self._prefixes.reported(row, expected, depth, prompt, tokens)

    def response_owner(self, response: str) -> str | None:
        """The replica that holds a stored response; None where that is not known, or no request
        may be sent there now. One that drains still answers for what it holds."""
        replica = self.responses.owner(response) or ""
        return replica if self.eligibility.works(replica) else None

    # -- what other routers tell ------------------------------------------------------------

    def receive_digest(self, digest: Digest, age: float = 0.0) -> None:
        if digest.router != self.router:  # the router's own come back, and measure the delay
            self._progress.advance(self._clock())
        if self.peers.receive(digest, age):
            self._progress.changed()

    def receive_prompts(self, router: str, prompts: bytes) -> None:
        """A router sent these prompts, by its :attr:`sent`.

        Raises:
            ValueError: they cannot be read.
        """
        if router == self.router:
            return
        for replica, prefix in read_prompts(prompts):
            if (row := self._rows.get(replica)) is None:
                continue
            if prefix.tokens:
                self._remember(row, prefix)
            else:
                self._prefixes.clear(row)

    def _remember(self, row: int, prefix: Prefix) -> None:
        if self.members.by_row[row].prefix_caching:
            self._prefixes.enter(row, prefix, self._replicas.kv_capacity.item(row))

    def reports_capacity(self, rows: Indices) -> NDArray[np.bool_]:
        """Which replicas have figures to go by: they tell how large their KV cache is, their speed
        was measured, and they were heard of lately."""
        return (self._replicas.tells[rows] > 0.0) & self._ledger.heard_lately(rows, self._clock())

    def free_kv_tokens(self, replica: str) -> float:
        """KV tokens that nothing takes there, nor waits for. Without end where nothing is in flight
        that could make room, or it is no member; less than none where one waits for a seat."""
        row, table = self._rows.get(replica), self._replicas
        if row is None:
            return inf
        others = table.external.item(row) + table.peers_requests.item(row)
        if table.requests.item(row) + others <= 0.0:
            return inf
        queued = table.queued.item(row) + table.peers_queued.item(row)
        taken = table.batch.item(row) + max(queued, table.polled_waiting.item(row))
        if not table.by_priority.item(row) and taken > table.max_num_seqs.item(row):
            return -inf  # by priority, a request may go before those that are queued
        backlog = table.joining.item(row) + table.external_backlog.item(row)
        backlog += table.peers_backlog.item(row)
        return table.kv_capacity.item(row) - table.kv_used.item(row) - backlog

    # -- what policies see ------------------------------------------------------------------

    def view(
        self,
        model: str,
        among: frozenset[str] | None = None,
        response_visible: bool = True,
        priority: int = 0,
    ) -> FleetView:
        """The replicas that may serve a request, as of now.

        Args:
            model: what it is for.
            among: the only ones that may be chosen; None: all.
            told: whether Envoy tells of the response.
            priority: the request's; what lets it go before does not count as queued.
        """
        self._look()
        candidates = self.eligibility.candidates(model, among, response_visible)
        if self.eligibility.any_new:
            table = self._replicas
            requests = table.requests + table.external
            if self.peers.counted:
                requests += table.peers_requests
            candidates = self.eligibility.without_full(candidates, model, requests)
        view = self._view(candidates)
        if len(view) and most(view.by_priority) > 0.0:
            self._put_behind(view, priority)
        if self.eligibility.any_new:
            self.eligibility.favour_idle(view)
        return view

    def _put_behind(self, view: FleetView, priority: int) -> None:
        """What lets a request of that priority go before it is not queued, to it."""
        tokens, requests = self._ledger.behind(priority)
        view.behind = tokens[view.rows]
        view.backlog -= view.behind
        view.taken -= view.behind
        view.waiting = np.maximum(view.waiting - requests[view.rows], 0.0)

    def overview(self) -> FleetView:
        """All members, as of now; ``excluded`` are those that something speaks against, whatever
        the model that is asked for."""
        self._look()
        return self._view(self.eligibility.all_members())

    def warm_tokens(self, replica: str) -> float:
        """Tokens that a member has in its prefix cache: by its own word, or else as many as it
        should have by what was sent there."""
        row, blocks = self._rows[replica], self.blocks.count(replica)
        if blocks is None:
            return self._prefixes.tokens(row)
        return float(blocks * self.members.by_row[row].block_size)

    def _look(self) -> None:
        now = self._clock()
        if self.peers.refresh(now):
            self._progress.changed()
        self._progress.advance(now)
        self._progress.refresh()
        if self._corrections.due(now):
            decoded = self._replicas.peers[[DECODED, EXPECTED]]
            self._replicas.stretch[:] = self._corrections.ratios(now, decoded)

    def _view(self, candidates: Candidates) -> FleetView:
        rows, table = candidates.rows, self._replicas
        columns = table.copy(_IN_VIEW, None if len(rows) == len(table) else rows)
        view = FleetView(candidates, columns)
        view.taken = view.kv_used + view.joining + view.external_backlog
        view.beside_steps = self.first_tokens.beside_steps
        if self.peers.counted:
            view.requests += table.peers_requests[rows]
            view.queued += table.peers_queued[rows]
            view.enqueued += table.peers_backlog[rows]
            view.taken += table.peers_backlog[rows]
        view.requests += view.external
        view.waiting = np.maximum(view.queued, view.polled_waiting)
        view.backlog = view.enqueued - view.prefilled + view.external_backlog
        return view

    def prefix_hits(self, prefix: Prefix, view: FleetView) -> PrefixHits:
        """What the candidates of a view hold of a prompt in their prefix caches: by their own word,
        or what they should by what was sent."""
        held = self._prefixes.hits(prefix, view.rows)
        told = self.blocks.held(prefix, view.adapters, view.ids)
        if told is None:
            return held
        estimated = np.isnan(told)
        return PrefixHits(
            np.where(estimated, held.expected, told),
            np.where(estimated, held.depths, -1),
            np.where(estimated, held.cached, told),
        )

    def sequences(self, view: FleetView) -> Sequences:
        """What is in flight on the candidates of a view; good until the fleet changes.

        The ledger's sequences, and beside them one entry a replica for the peers' together, and
        one for those only polls saw.
        """
        self._progress.look_ahead()
        table, rows = self._replicas, view.rows
        on, figures = self._requests.replica, self._requests.first(SEEN)
        if len(rows) < len(table):
            candidate = np.full(len(table), -1, dtype=np.intp)
            candidate[rows] = np.arange(len(rows))
            on = candidate[on]
            keep = (on >= 0).nonzero()[0]
            on, figures = on[keep], figures.take(keep, axis=1)
        if self.peers.counted:
            weight = (table.peers_joining + table.peers_decoding)[rows]
            tokens = (table.peers_kv + table.peers_backlog)[rows]
            on, figures = _beside(on, figures, weight, tokens, table.peers_remaining[rows])
        external = table.external[rows]
        if len(external.nonzero()[0]):
            tokens = np.maximum(table.kv_unattributed[rows], 0.0)
            remaining = external * self.lengths.expected(0, _UNBOUNDED)
            on, figures = _beside(on, figures, external, tokens, remaining)
        return Sequences(on, *figures)

    def adapter_times(self, view: FleetView) -> AdapterTimes | None:
        """What a request for a LoRA adapter meets on the candidates of a view; None where the model
        is none."""
        return self.adapters.times(view, self._clock()) if view.adapters else None


def _beside(
    on: Indices, figures: Floats, weight: Floats, tokens: Floats, remaining: Floats
) -> tuple[Indices, Floats]:
    """Adds an entry for each candidate with sequences of others: ``weight`` of them, which have and
    will have so many tokens together. Their priority is not known."""
    there = weight.nonzero()[0]
    weight = weight[there]
    entries = weight, tokens[there] / weight, remaining[there] / weight, np.full(len(there), inf)
    return np.concatenate([on, there]), np.hstack([figures, entries])

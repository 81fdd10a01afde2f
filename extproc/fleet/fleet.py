"""State of all replicas of a pool: polled figures, this router's requests, and their progress."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from math import inf
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from extproc.fleet.adapters import AdapterSlots
from extproc.fleet.announcements import OwnerMap, PromptLog, SentPrompt
from extproc.fleet.digest import BACKLOG, QUEUED, Digest
from extproc.fleet.digest_source import DigestSource
from extproc.fleet.eligibility import Eligibility
from extproc.fleet.held_blocks import HeldBlocks
from extproc.fleet.ledger import LATE_S, Generated, Ledger, Ticket
from extproc.fleet.members import Members, ModelNames
from extproc.fleet.peers import Peers
from extproc.fleet.prefix_index import PrefixHits, PrefixIndex
from extproc.fleet.progress import Progress
from extproc.fleet.reconcile import Reconciliation
from extproc.fleet.speeds import Speeds
from extproc.fleet.tables import Replicas, Requests
from extproc.fleet.views import sequences_on, view_of
from extproc.ground.clock import Clock, monotonic, wall
from extproc.predict.inputs import FleetView, Indices, Sequences, most
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState
from extproc.request.prefix import NO_PREFIX, Prefix
from extproc.request.profile import RequestProfile

_MAY_FIT = 2.0
"""Estimated tokens ÷ tokens that fit, up to which a prompt may fit all the same. Prose counts 1.8
times its tokens if most prompts of the model have 2.5 bytes per token."""
_MOVED_WITHIN_S = 2.5  # longer than two polls that are at most 1.1 s apart, and a slow scrape


class Fleet:
    """Replicas of a pool, this router's requests on them, and the load that other routers report.

    Methods here are the view for policies, and the events that several parts must handle in a
    certain order: a poll, a digest, and a request that is dispatched, retried elsewhere or ended.
    Callers reach a single part through its attribute.
    """

    def __init__(
        self,
        lengths: OutputLengths,
        clock: Clock = monotonic,
        wall: Clock = wall,
        names: ModelNames | None = None,
        address: str = "router",
    ) -> None:
        """``address``: host and port of this router, the first part of its name."""
        self.router = f"{address}:{uuid4().hex[:8]}"  # name among routers, new with each start
        self.members_known = asyncio.Event()  # see :meth:`listed`
        self._listed: Set[str] = frozenset()
        self.pollers: Mapping[str, Sequence[str]] | None = None
        """Address of each living poller → sources that it cannot look up; None: not known."""
        self.stopped_pollers: Collection[str] = ()  # names of pollers that stopped lately
        self._clock = clock
        self._replicas = replicas = Replicas()
        self._requests = requests = Requests()
        self.lengths = lengths
        self.members = Members(names or ModelNames())
        self._rows = rows = self.members.rows
        self.eligibility = Eligibility(clock, self.members.names, rows, replicas)
        self.responses = OwnerMap()
        self.sessions = OwnerMap()
        self.prompt_log = PromptLog()
        self.blocks = HeldBlocks(clock)
        self.peers = Peers(self.router, replicas, rows, clock, wall)
        self._prefixes = PrefixIndex(replicas)
        self.speeds = Speeds(replicas, self.members, clock)
        self._progress = Progress(replicas, requests, self.peers, lengths, clock())
        self._ledger = Ledger(replicas, requests, self._progress, lengths)
        self.adapters = AdapterSlots(replicas, rows, self._ledger, lengths)
        self._reconciliation = Reconciliation(replicas, requests, self.peers)
        self.digests = DigestSource(
            self.router, replicas, requests, self._progress, self.speeds, self.members, wall
        )

    # -- membership and polls ---------------------------------------------------------------

    def put(self, state: ReplicaState, age: float = 0.0) -> None:
        """Updates the fleet with the state of a replica, polled ``age`` seconds ago. A new replica
        becomes a member."""
        now = self._clock()
        asked_at = now - age - state.scrape_seconds
        self._progress.advance(now)
        self.members.relisted(self.members.models_on(state.id), state.models, now)
        row = self._rows[state.id] if state.id in self._rows else self._join(state)
        before = self.members.by_row[row]
        frozen = self.eligibility.polled(state, age)
        self.blocks.polled(state)
        fell = state.steps < self._replicas.polled_steps[row]
        if state.started_at and before.started_at:
            restarted = state.started_at != before.started_at
        else:
            restarted = fell and state.scraped_at >= before.scraped_at
        # A late poller, or a push during a snapshot, may bring an older state of the same process.
        is_older = fell and not restarted
        is_new = not (frozen or is_older or state.scraped_at == before.scraped_at)
        restarted &= is_new
        self.members.by_row[row] = state
        self.speeds.polled(row, state, restarted)
        self._replicas.reports[row] = state.kv_tokens > 0 and state.measured
        if frozen:
            self._replicas.sampled_at[row] = -inf  # drops the external load, as after a stale poll
            self._progress.invalidate()
        if restarted:
            self.eligibility.restarted(state.id)
            self._reconciliation.restarted(row, state.steps)
            self.adapters.clear(row)
        # vLLM discards the cache before it sleeps.
        if restarted or (is_new and state.asleep > before.asleep):
            self._prefixes.clear(row)
            self.prompt_log.add(state.id, NO_PREFIX)
        if not is_new or not state.healthy or state.unanswered_s > 0.0:
            return  # the figures are old, or their time is not known
        self._prefixes.polled(row, state)
        self._progress.corrected(row, self._reconciliation.polled(row, state, asked_at, now))
        self.adapters.polled(row, state, asked_at, now)  # forecasts from the corrected requests

    def remove(self, replica: str) -> None:
        """Removes a replica from the members; its requests in flight stay until they end."""
        self.members.relisted(self.members.models_on(replica), (), self._clock())
        self.speeds.left(self._rows.pop(replica, -1))
        self.eligibility.forget(replica)
        self.blocks.forget(replica)

    def listed(self, replicas: Collection[str]) -> None:
        """Notes the replicas that all living pollers together list. Once each is a member, all
        members are known: a model that no member lists is unknown."""
        self._listed = {*replicas}
        self._compare_with_list()

    @property
    def is_empty(self) -> bool:
        """True if living pollers list no replica."""
        return bool(self.pollers) and not self._listed

    @property
    def is_known(self) -> bool:
        """True if a replica is known, or if living pollers read every source and found none."""
        return bool(self.members) or (self.is_empty and not any((self.pollers or {}).values()))

    def _compare_with_list(self) -> None:
        if self._listed and self._rows.keys() >= self._listed:
            self.members_known.set()

    def drop_stale(self, after: float) -> None:
        """Removes replicas without an update for ``after`` s while other replicas were updated.

        Also forgets dead peers, and KV blocks of replicas that are no members.
        """
        if self.peers.refresh(self._clock()):
            self._progress.invalidate()
        for name in self.eligibility.staleness.stale(after):
            self.remove(name)
        if self.members_known.is_set():
            self.blocks.keep(self.members)

    def _join(self, state: ReplicaState) -> int:
        """Returns a row for a replica: its former row, where its last state stands and its requests
        in flight still count, or else an unused row with an empty state."""
        known = (row for row, former in enumerate(self.members.by_row) if former.id == state.id)
        row = next(known, None)
        if row is None:
            taken = {*self._rows.values(), *self._requests.replica.tolist()}
            row = next((row for row in range(len(self._replicas)) if row not in taken), None)
            if row is None:
                row = self._replicas.append()
                self.members.by_row.append(state)
            self.members.by_row[row] = ReplicaState(id=state.id, scraped_at=-inf)
            for part in (self._replicas, self.peers, self._prefixes, self.adapters):
                part.clear(row)
            self._replicas.write(
                row,
                steps=state.steps,
                polled_steps=state.steps,
                chunk=1.0,
                stretch=1.0,
                sampled_at=inf,
            )
        self.speeds.joined(row)
        self._rows[state.id] = row
        self._compare_with_list()
        return row

    # -- this router's requests -------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds on the fleet's clock."""
        return self._clock()

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def external_requests(self) -> float:
        """Sequences that no router accounts for, on all replicas together.

        Replicas whose figures do not move are left out, because their figures may be old. The
        result is 0 while a peer does not count, because its requests look external.
        """
        if not self.peers.all_count:
            return 0.0
        progresses = self.eligibility.progresses
        rows = [row for name, row in self._rows.items() if progresses(name, _MOVED_WITHIN_S)]
        return float(self._replicas.external[rows].sum())

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
        """Adds to the ledger a request that is now sent to ``replica`` (``ip:port``).

        ``cached``: prompt tokens in the replica's prefix cache. ``response_visible``: Envoy
        forwards the response to the router.

        Raises:
            KeyError: the replica is not a member.
        """
        row, now = self._rows[replica], self._clock()
        self.eligibility.sent(replica, response_visible)
        ticket = self._ledger.enter(row, profile, now, cached)
        self._sent(row, profile.prefix)
        adapter = self.eligibility.adapter(replica, profile.model)
        self.blocks.sent(replica, profile.prefix, adapter)
        self.adapters.sent(row, ticket, adapter, now)
        return ticket

    def move(self, ticket: Ticket, replica: str, prefix: Prefix = NO_PREFIX) -> None:
        """Moves a request to the replica on which Envoy retried it, if that replica is a member."""
        row, now = self._rows.get(replica), self._clock()
        if row is not None:
            cached = self._prefixes.hits(prefix, np.array([row])).cached.item()
            self._ledger.move(ticket, row, now, cached)
            self.adapters.moved(ticket, row, now)
            self._sent(row, prefix)

    def first_token(self, ticket: Ticket) -> None:
        self._ledger.first_token(ticket, self._clock())

    def release(self, ticket: Ticket, prefilled: bool = True) -> Generated:
        """Removes a request from the ledger; returns its output. ``prefilled``: its prompt, and all
        prompts queued before it, are known to be prefilled.

        Raises:
            KeyError: the request was released before.
        """
        now = self._clock()
        row, generated = self._ledger.release(ticket, now, prefilled)
        self.adapters.ended(ticket, now)
        self.eligibility.ended(self.members.by_row[row].id)
        return generated

    def reported(self, replica: str, expected: float, prompt: float, tokens: float) -> None:
        """Learns how far to trust the prefix index from a response that reports ``tokens`` cached
        tokens of a ``prompt`` (tokens); :meth:`prefix_hits` estimated ``expected`` tokens."""
        if (row := self._rows.get(replica)) is not None:
            self._prefixes.reported(row, expected, prompt, tokens)

    def response_owner(self, response: str) -> str | None:
        """Returns the replica that stores a response, draining or not; None if unknown or down."""
        replica = self.responses.owner(response) or ""
        return replica if self.eligibility.is_up(replica) else None

    # -- other routers ----------------------------------------------------------------------

    def receive_digest(self, digest: Digest, age: float = 0.0) -> None:
        """Adds a digest, possibly this router's own, that Redis received ``age`` seconds ago."""
        if digest.router != self.router:
            self._progress.advance(self._clock())
        if self.peers.receive(digest, age):
            self._progress.invalidate()

    def receive_prompts(self, router: str, prompts: Iterable[SentPrompt]) -> None:
        """Adds to the prefix index the prompts that another router dispatched."""
        if router == self.router:
            return
        for prompt in prompts:
            if (row := self._rows.get(prompt.replica)) is None:
                continue
            if prompt.tokens:
                self._index(row, prompt.prefix)
            else:
                self._prefixes.clear(row)

    def _sent(self, row: int, prefix: Prefix) -> None:
        if self._index(row, prefix):
            self.prompt_log.add(self.members.by_row[row].id, prefix)

    def _index(self, row: int, prefix: Prefix) -> bool:
        """Adds a prompt to the prefix index; returns False if the prompt has no tokens or far too
        many, or if the replica has no prefix cache."""
        fits = 0.0 < prefix.tokens <= _MAY_FIT * self._replicas.longest_prompt.item(row)
        if caches := fits and self.members.by_row[row].prefix_caching:
            self._prefixes.enter(row, prefix, self._replicas.kv_capacity.item(row))
        return caches

    # -- room for requests ------------------------------------------------------------------

    def reports_capacity(self, rows: Indices) -> NDArray[np.bool_]:
        """Returns for each row whether its replica is measured, reports the size of its KV cache,
        and was polled lately."""
        age = self._clock() - self._replicas.sampled_at[rows]
        return (self._replicas.reports[rows] > 0.0) & (age >= 0.0) & (age <= LATE_S)

    def free_kv_tokens(self, replica: str) -> float:
        """Returns the KV tokens of a replica that no request holds or waits for.

        Returns infinity if no request is in flight on the replica, or if the replica is no member;
        −∞ if requests wait for a place in its batch.
        """
        row, table = self._rows.get(replica), self._replicas
        if row is None:
            return inf
        if table.all_requests(row) <= 0.0:
            return inf
        queued = table.queued.item(row) + table.peers.item(QUEUED, row)
        taken = table.batch.item(row) + max(queued, table.polled_waiting.item(row))
        if not table.by_priority.item(row) and taken > table.max_num_seqs.item(row):
            return -inf  # with priorities, a request may overtake the queued ones
        backlog = table.joining.item(row) + table.external_backlog.item(row)
        backlog += table.peers.item(BACKLOG, row)
        return table.kv_capacity.item(row) - table.kv_used.item(row) - backlog

    # -- views for policies -----------------------------------------------------------------

    def view(
        self,
        model: str,
        among: frozenset[str] | None = None,
        response_visible: bool = True,
        priority: int = 0,
    ) -> FleetView:
        """Returns the replicas that may serve a request, as of now.

        ``priority``: priority of the request; requests that it may overtake do not count as queued.
        The other arguments are those of :meth:`Eligibility.candidates`.
        """
        self._update()
        candidates = self.eligibility.candidates(model, among, response_visible, slow_start=True)
        view = view_of(candidates, self._replicas, self.speeds.first_tokens.outside_steps)
        if len(view) and most(view.by_priority) > 0.0:
            tokens, requests = self._ledger.behind(priority)
            view.overtaken = tokens[view.rows]
            view.backlog -= view.overtaken
            view.taken -= view.overtaken
            view.waiting = np.maximum(view.waiting - requests[view.rows], 0.0)
        self.speeds.favour_untried(view)
        return view

    def overview(self) -> FleetView:
        """Returns a view of all members at this moment. ``excluded`` of the view lists the members
        that get no requests for any model."""
        self._update()
        members = self.eligibility.all_members()
        return view_of(members, self._replicas, self.speeds.first_tokens.outside_steps)

    def warm_tokens(self, replica: str) -> float:
        """Returns the tokens in a member's prefix cache: as reported, or else as estimated."""
        row, blocks = self._rows[replica], self.blocks.count(replica)
        if blocks is None:
            return self._prefixes.tokens(row)
        return float(blocks * self.members.by_row[row].block_size)

    def _update(self) -> None:
        now = self._clock()
        if self.peers.refresh(now):
            self._progress.invalidate()
        self._progress.advance(now)
        self._progress.refresh()
        self.speeds.refresh(now)

    def prefix_hits(self, prefix: Prefix, view: FleetView) -> PrefixHits:
        """Returns the cached tokens of a prompt on each candidate: reported by the candidate, or
        else expected by the prefix index."""
        hits = self._prefixes.hits(prefix, view.rows)
        reported = self.blocks.hits(prefix, view.adapters, view.ids)
        if reported is None:
            return hits
        estimated = np.isnan(reported)
        return PrefixHits(
            np.where(estimated, hits.expected, reported),
            np.where(estimated, hits.cached, reported),
            estimated,
        )

    def sequences(self, view: FleetView) -> Sequences:
        """Returns the sequences in flight on the candidates, valid until the fleet changes."""
        self._progress.look_ahead()
        return sequences_on(view, self._replicas, self._requests, self.lengths)

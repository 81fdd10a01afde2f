"""Ledger of this router's requests in flight, from dispatch until the stream ends."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, NewType, cast

import numpy as np

from extproc.fleet.digest import BACKLOG
from extproc.fleet.progress import Progress
from extproc.fleet.tables import Replicas, Requests, count
from extproc.predict.inputs import Floats, Indices
from extproc.predict.lengths import OutputLengths
from extproc.request.profile import RequestProfile

LATE_S = 2.0  # time without a poll after which a replica's steps are only predicted

Ticket = NewType("Ticket", int)  # a request's place in the ledger, from dispatch to release


class Generated(NamedTuple):
    """Output of a request so far, by the steps that its replica has made since the first token.

    All are 0 if there was no first token, or no recent poll counted the steps.
    """

    tokens: float  # of each sequence
    seconds: float  # since the first token
    counted: float  # those of ``tokens`` that the last poll counted


@dataclass(eq=False)
class Ledger:
    """Requests in flight. Callers name a replica by its row."""

    _replicas: Replicas
    _requests: Requests
    _progress: Progress
    _lengths: OutputLengths
    _row: dict[int, int] = field(default_factory=dict, init=False)  # by ticket
    _tickets: int = field(default=0, init=False)  # issued so far

    def enter(self, replica: int, profile: RequestProfile, now: float, cached: float) -> Ticket:
        """Adds a request that is dispatched now; ``cached``: prompt tokens in the prefix cache."""
        self._progress.advance(now)
        context = self._replicas.longest_prompt.item(replica)
        bound, prompt = profile.most_output(context), profile.computed_prompt(context)
        least = min(float(profile.least_output), bound)
        lengths = self._lengths
        kind = lengths.hold(profile)
        begin, cut = lengths.place(kind, bound)
        each = prompt / max(profile.sequences, 1)
        new = max(prompt - cached, 0.0)
        prompt_end = self._enqueue(replica, new, profile.priority)
        self._tickets += 1
        ticket = Ticket(self._tickets)
        row = self._row[ticket] = self._requests.append(
            weight=profile.sequences,
            context=each,
            remaining=max(lengths.expected(kind, bound), least),
            priority=profile.priority,
            generated=0.0,
            sent_at=now,
            prompt=new,
            each=each,
            prompt_end=prompt_end,
            parts=profile.parts,
            steps_before=inf,
            began_at=0.0,
            bound=bound,
            least_output=least,
            until=0.0,
            replica=replica,
            ticket=ticket,
            lengths=begin,
            alive=0,
            cut=cut,
        )
        count(self._replicas, self._requests, row, 1)
        return ticket

    def behind(self, priority: float) -> tuple[Floats, Floats]:
        """Returns the prompt tokens, and the number of requests, that a request of this priority
        may overtake on each replica."""
        requests, count = self._requests, len(self._replicas)
        rows = self._behind(priority)
        on = requests.replica[rows]
        tokens = cast(Floats, np.bincount(on, requests.prompt[rows], count))
        return tokens, cast(Floats, np.bincount(on, np.ones(len(on)), count))

    def ends(self, replica: int) -> dict[int, float]:
        """Forecasts when each request on the replica ends, by ticket, as if no prompt were waiting
        for prefill."""
        table, requests = self._replicas, self._requests
        token = table.decode_step.item(replica) / table.tokens_per_step.item(replica)
        here = (requests.replica == replica).nonzero()[0]
        ends = requests.remaining[here] * token + self._progress.refreshed_at
        return dict(zip(requests.ticket[here].tolist(), ends.tolist(), strict=True))

    def _generated(self, row: int, now: float) -> Generated:
        requests, replicas = self._requests, self._replicas
        on, before = requests.replica.item(row), requests.steps_before.item(row)
        if before == inf or not 0.0 <= now - replicas.sampled_at.item(on) <= LATE_S:
            return Generated(0.0, 0.0, 0.0)
        per_step, bound = replicas.tokens_per_step.item(on), requests.bound.item(row)
        tokens = min(max((replicas.steps.item(on) - before) * per_step, 0.0), bound)
        counted = min(max((replicas.polled_steps.item(on) - before) * per_step, 0.0), bound)
        return Generated(tokens, max(now - requests.began_at.item(row), 0.0), counted)

    def move(self, ticket: Ticket, replica: int, now: float, cached: float) -> None:
        """Moves a retried request to another replica; ``cached``: prompt tokens cached there."""
        self._progress.advance(now)
        requests, row = self._requests, self._row[ticket]
        self._dequeue(row)
        count(self._replicas, requests, row, -1)
        requests.replica[row] = replica
        requests.sent_at[row] = now
        requests.steps_before[row] = inf
        requests.until[row] = 0.0
        whole = requests.each.item(row) * max(requests.weight.item(row), 1.0)
        requests.prompt[row] = max(whole - cached, min(whole, 1.0))
        requests.prompt_end[row] = self._enqueue(
            replica, requests.prompt.item(row), requests.priority.item(row)
        )
        count(self._replicas, requests, row, 1)
        self._progress.invalidate()

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Marks a request's prompt, and all prompts before it on the replica, as prefilled. If the
        first token was predicted earlier, the request's output counts anew from now on."""
        self._progress.advance(now)
        requests, row = self._requests, self._row[ticket]
        self._prefilled(row)
        if requests.steps_before.item(row) < inf:
            steps = self._replicas.steps.item(requests.replica.item(row))
            requests.steps_before[row], requests.began_at[row] = steps - 1.0, now
            requests.until[row] = 0.0  # the request has fewer tokens than predicted
        self._progress.invalidate()

    def release(self, ticket: Ticket, now: float, prefilled: bool) -> tuple[int, Generated]:
        """Removes a request; returns its replica and its output."""
        self._progress.advance(now)
        row = self._row.pop(ticket)
        generated = self._generated(row, now)
        if prefilled:
            self._prefilled(row)
        else:
            self._dequeue(row)
        requests = self._requests
        self._progress.remove(row)
        count(self._replicas, requests, row, -1)
        self._lengths.release(requests.lengths.item(row))
        replica = requests.replica.item(row)
        if requests.drop(row) != row:
            self._row[requests.ticket.item(row)] = row
        return replica, generated

    def _enqueue(self, replica: int, tokens: float, priority: float) -> float:
        """Queues a prompt behind all others, or before prompts of lower priority; returns the
        column ``prompt_end`` of its request."""
        replicas, requests = self._replicas, self._requests
        prompt_end = replicas.enqueued.item(replica) + tokens
        replicas.enqueued[replica] = prompt_end
        backlog = (
            prompt_end - replicas.prefilled.item(replica) + replicas.peers.item(BACKLOG, replica)
        )
        replicas.chunk[replica] = max(min(backlog, replicas.token_budget.item(replica)), 1.0)
        if replicas.by_priority.item(replica):
            behind = self._behind(priority)
            behind = behind[requests.replica[behind] == replica]
            prompt_end -= requests.prompt[behind].sum().item()
            requests.prompt_end[behind] += tokens
        return prompt_end

    def _behind(self, priority: float) -> Indices:
        """Returns the rows of requests with a lower priority whose prefill has not begun, on
        replicas that schedule by priority.

        Only pools with such replicas need the rows: at each decision, and at each dispatch to such
        a replica. numpy compares all requests in flight, which takes 20 µs with 12,000 of them.
        """
        requests, replicas = self._requests, self._replicas
        lower = (requests.steps_before == inf) & (requests.priority < priority)
        rows: Indices = lower.nonzero()[0]
        on = requests.replica[rows]
        begun = requests.prompt_end[rows] - requests.prompt[rows] < replicas.prefilled[on]
        return rows[(replicas.by_priority[on] > 0.0) & ~begun]

    def _dequeue(self, row: int) -> None:
        """Removes the unprefilled part of a request's prompt from the backlog of its replica.

        The prompts behind move up. Finding them among 12,000 requests in flight takes numpy 5 µs,
        and is needed only for a request without a first token.
        """
        requests, replicas = self._requests, self._replicas
        replica, prompt_end = requests.replica.item(row), requests.prompt_end.item(row)
        missing = prompt_end - replicas.prefilled.item(replica)
        if requests.steps_before.item(row) < inf or missing <= 0.0:
            return
        left = min(missing, requests.prompt.item(row))
        behind = ((requests.replica == replica) & (requests.prompt_end >= prompt_end)).nonzero()[0]
        requests.prompt_end[behind] -= left
        enqueued = replicas.enqueued.item(replica) - left
        # Rounding errors could put the end of the queue before the prefilled tokens.
        replicas.enqueued[replica] = max(enqueued, replicas.prefilled.item(replica))

    def _prefilled(self, row: int) -> None:
        requests, replicas = self._requests, self._replicas
        replica = requests.replica.item(row)
        prompt_end = requests.prompt_end.item(row)
        replicas.prefilled[replica] = max(replicas.prefilled.item(replica), prompt_end)
        replicas.seen[replica] = max(replicas.seen.item(replica), prompt_end)
        sent_at = max(replicas.prefilled_sent_at.item(replica), requests.sent_at.item(row))
        replicas.prefilled_sent_at[replica] = sent_at

"""This router's requests in flight: taken in when sent, let go when their stream ends."""

from dataclasses import dataclass

import numpy as np

from extproc.fleet.progress import Progress
from extproc.fleet.table import Table
from extproc.predict.lengths import OutputLengths
from extproc.request.profile import RequestProfile

UNBOUNDED = 131_072.0
"""Tokens a sequence may generate where neither the request nor the model says."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in the ledger, from dispatch to release."""

    number: int


class Ledger:
    """Requests in flight, on rows of replicas. Progress must be up to date when one changes."""

    def __init__(
        self, replicas: Table, requests: Table, progress: Progress, lengths: OutputLengths
    ) -> None:
        self._replicas = replicas
        self._requests = requests
        self._progress = progress
        self._lengths = lengths
        self._row: dict[int, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._requests)

    def take(
        self, replica: int, profile: RequestProfile, now: float, context: int | None
    ) -> Ticket:
        """Takes a request in, as sent now to a replica whose model has that context length."""
        bound = float(_bound(profile, context))
        row = self._lengths.row(profile)
        self._tickets += 1
        self._row[self._tickets] = self._requests.append(
            replica=replica,
            ticket=self._tickets,
            sent_at=now,
            prompt=profile.prompt_tokens,
            mark=self._enqueue(replica, profile.prompt_tokens),
            first_step=np.inf,
            remaining=max(self._lengths.expected(row, bound), profile.least_output),
            least=profile.least_output,
            weight=profile.sequences,
            bound=bound,
            lengths=row,
        )
        self._replicas["requests"][replica] += 1
        return Ticket(self._tickets)

    def move(self, ticket: Ticket, replica: int) -> None:
        """The request is on another replica than it was sent to."""
        row = self._row[ticket.number]
        if self._requests["replica"][row] == replica:
            return
        self._dequeue(row)
        self._requests["replica"][row] = replica
        self._requests["first_step"][row] = np.inf
        self._requests["mark"][row] = self._enqueue(replica, self._requests["prompt"][row])
        self._progress.changed()

    def first_token(self, ticket: Ticket) -> None:
        """Its prompt is prefilled, and so are all that were queued before it."""
        self._prefilled(self._row[ticket.number])

    def release(self, ticket: Ticket, prefilled: bool) -> None:
        """Lets a request go; a second time does nothing."""
        row = self._row.pop(ticket.number, None)
        if row is None:
            return
        if prefilled:
            self._prefilled(row)
        else:
            self._dequeue(row)
        if self._requests.drop(row) != row:
            self._row[int(self._requests["ticket"][row])] = row
        self._progress.changed()

    def _enqueue(self, replica: int, tokens: float) -> float:
        replicas = self._replicas
        replicas["enqueued"][replica] += tokens
        mark = float(replicas["enqueued"][replica])
        backlog = mark - replicas["prefilled"][replica]
        replicas["chunk"][replica] = max(min(backlog, replicas["token_budget"][replica]), 1.0)
        return mark

    def _dequeue(self, row: int) -> None:
        """Takes what is not prefilled of its prompt from the replica's backlog."""
        requests, replicas = self._requests, self._replicas
        replica, mark = requests["replica"][row], requests["mark"][row]
        left = min(max(mark - replicas["prefilled"][replica], 0.0), requests["prompt"][row])
        behind = (requests["replica"] == replica) & (requests["mark"] >= mark)
        requests["mark"][behind] -= left
        replicas["enqueued"][replica] -= left

    def _prefilled(self, row: int) -> None:
        replica = self._requests["replica"][row]
        prefilled = self._replicas["prefilled"]
        prefilled[replica] = max(prefilled[replica], self._requests["mark"][row])
        self._progress.changed()


def _bound(profile: RequestProfile, context: int | None) -> float:
    if profile.output_bound is not None:
        return profile.output_bound
    return max(context - profile.prompt_tokens, 1) if context else UNBOUNDED

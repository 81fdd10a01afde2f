"""Reconciliation of a poll's counters with the requests that this router sent."""

from dataclasses import dataclass
from math import inf

import numpy as np

from extproc.fleet.digest import DECODING, KV, PARTS, QUEUED, REQUESTS
from extproc.fleet.peers import Peers
from extproc.fleet.tables import Replicas, Requests
from extproc.predict.inputs import Floats, Indices
from extproc.replica_state import ReplicaState

_LATE = 0.3  # seconds of a scrape above which its figures are too old to tell external load
_UNDER_WAY = 0.1  # seconds until the engine has a request, beside the tokenizer's
_TOKENIZED = 5e-6  # seconds of the tokenizer for each token of a prompt


@dataclass(eq=False)
class Reconciliation:
    """Corrects the row of a replica, and the rows of its requests, from a poll.

    Requests sent after the poll are added to the polled load.
    """

    _replicas: Replicas
    _requests: Requests
    _peers: Peers

    def restarted(self, row: int, steps: float) -> None:
        """Begins a replica's counts anew: its process restarted, and has made ``steps`` steps."""
        replicas, requests = self._replicas, self._requests
        requests.steps_before[requests.replica == row] -= replicas.steps[row] - steps
        replicas.steps[row] = replicas.polled_steps[row] = steps
        replicas.prefilled[row] = replicas.enqueued[row]

    def polled(self, row: int, state: ReplicaState, asked_at: float, now: float) -> Indices:
        """Corrects steps, prefills and external load of the replica in ``row``; returns the rows of
        its requests.

        The poll was sent at ``asked_at`` (seconds on the fleet's clock), and the state was sampled
        within ``state.scrape_seconds`` afterwards.
        """
        requests = self._requests
        sampled_at = asked_at + state.scrape_seconds / 2
        own: Indices = (requests.replica == row).nonzero()[0]
        at_poll = own
        self._correct_steps(row, own, state.steps, now - sampled_at)
        if len(own):
            order = own[requests.prompt_end[own].argsort()]
            self._correct_prefills(row, order, state, asked_at, now)
            at_poll = order[requests.sent_at[order] <= sampled_at]
        self._correct_external(row, at_poll, state)
        self._correct_kv(row, at_poll, state, now - sampled_at)
        self._replicas.sampled_at[row] = sampled_at
        return own

    def _correct_steps(self, row: int, own: Indices, polled: float, age: float) -> None:
        replicas, requests = self._replicas, self._requests
        busy = replicas.batch.item(row) > 0
        steps = polled + (age / replicas.decode_step.item(row) if busy else 0.0)
        shift = steps - replicas.steps.item(row)
        if len(own):
            # The counts at which requests began since the last poll were off by the same shift.
            since = own[requests.steps_before[own] > replicas.polled_steps.item(row) - 1.0]
            requests.steps_before[since] += shift
            requests.until[own] = 0.0
        replicas.steps[row] = steps
        replicas.polled_steps[row] = polled

    def _correct_external(self, row: int, at_poll: Indices, state: ReplicaState) -> None:
        """Sets the external load: the polled load minus the requests of this router at the poll
        (``at_poll``) and of the peers.

        The replica's queue may contain the requests that routers count as queued. Only the rest of
        the queue is external.
        """
        replicas = self._replicas
        if in_time := state.scrape_seconds <= _LATE:
            known = sum(self._requests.parts[at_poll].tolist()) + replicas.peers.item(PARTS, row)
            replicas.unattributed_before[row] = replicas.unattributed[row]
            replicas.unattributed[row] = state.running + state.waiting - known
            replicas.set_external()
        self._peers.polled(row, sequences=in_time)
        replicas.polled_waiting[row] = state.waiting
        replicas.polled_kv_usage[row] = state.kv_usage
        may_wait = replicas.queued.item(row) + replicas.peers.item(QUEUED, row)
        waiting = min(max(state.waiting - may_wait, 0.0), replicas.external.item(row))
        computed = max(state.prompt_tokens - state.cached_tokens, 0.0)
        prompt = computed / max(state.first_tokens, 1.0)
        replicas.external_backlog[row] = waiting * prompt

    def _correct_kv(self, row: int, at_poll: Indices, state: ReplicaState, age: float) -> None:
        """Sets the unattributed KV tokens: the polled tokens minus the tokens of this router's
        running requests and of the peers.

        The requests that were sent first are taken to be the running ones. A later request may
        count as begun although it had not reached the replica at the poll. Its KV tokens are not
        subtracted: the polled tokens lack them, and the replica will need them as well.
        """
        replicas, requests = self._replicas, self._requests
        polled = state.kv_usage * replicas.kv_capacity.item(row)
        replicas.kv_unattributed[row] = polled - replicas.peers.item(KV, row)
        if not len(at_poll):
            return
        others = replicas.peers.item(DECODING, row) + replicas.external.item(row)
        run = at_poll[requests.parts[at_poll].cumsum() <= state.running - others]
        end, prefilled = requests.prompt_end[run], replicas.prefilled.item(row)
        begun = (requests.steps_before[run] < inf) & (end <= prefilled)
        whole = requests.weight[run] * (requests.each[run] + requests.generated[run])
        prompt = requests.prompt[run]
        part = np.maximum(prefilled - self._prefill_rate(row) * age - (end - prompt), 0.0)
        part = np.minimum(part, prompt)  # np.clip takes three times as long
        known = float(np.where(begun, whole, part).sum()) + replicas.peers.item(KV, row)
        replicas.kv_unattributed[row] = polled - known

    def _correct_prefills(
        self, row: int, order: Indices, state: ReplicaState, asked_at: float, now: float
    ) -> None:
        """Corrects the prefilled prompt tokens to the range that the replica's queue allows.

        A replica prefills prompts in the order of arrival (``order``: rows of this router's
        requests). Prompts that left the queue are prefilled, except for the last of them or, if
        that is more, the tokens of one step. If the queue is longer than the number of other
        senders' requests, the excess is this router's: its last prompts, which are not prefilled.
        The queue may have been polled before the last first tokens, so prompts up to the last with
        an observed first token are not among them.
        """
        replicas, requests = self._replicas, self._requests
        least, most = self._left_queue(row, order, state, asked_at), replicas.enqueued.item(row)
        others = replicas.peers.item(REQUESTS, row) + replicas.external.item(row)
        # Several engines have a queue each: a sequence with a token may have overtaken others.
        seen = replicas.seen.item(row) if state.engines == 1 else 0.0
        ahead = order[requests.prompt_end[order] > seen]
        queued = ahead[self._numbers(ahead) <= state.waiting - others]
        if len(queued):
            first = queued.item(0)
            start = requests.prompt_end.item(first) - requests.prompt.item(first)
            most = min(most, max(start, least) + self._prefill_rate(row) * (now - asked_at))
        replicas.prefilled[row] = min(max(replicas.prefilled.item(row), least), most)

    def _left_queue(self, row: int, order: Indices, state: ReplicaState, asked_at: float) -> float:
        """Returns the prompt tokens that are certainly prefilled, because their requests left the
        replica's queue.

        vLLM's gauges date from the start of the step in progress at the poll. So only requests
        count that had certainly reached the engine before that start.
        """
        requests, budget = self._requests, self._replicas.token_budget.item(row)
        prompt = requests.each[order] * np.maximum(requests.weight[order], 1.0)
        reached_at = requests.sent_at[order] + _TOKENIZED * prompt
        under_way = _UNDER_WAY + 2.0 * self._step_with(row, budget)
        late = (reached_at > asked_at - under_way).nonzero()[0]
        settled = order[: late.item(0)] if len(late) else order
        left = settled[self._numbers(settled) > state.waiting]
        if not len(left):
            return 0.0
        last = left.item(-1)
        in_progress = max(budget, requests.prompt.item(last)) if state.running else 0.0
        return requests.prompt_end.item(last) - in_progress

    def _numbers(self, order: Indices) -> Floats:
        """Numbers requests from the last to the first, counting sequences as the engine does."""
        numbers: Floats = self._requests.parts[order][::-1].cumsum()[::-1]
        return numbers

    def _prefill_rate(self, row: int) -> float:
        chunk = self._replicas.chunk.item(row)
        return chunk / self._step_with(row, chunk)

    def _step_with(self, row: int, prompt_tokens: float) -> float:
        """Returns the seconds of a step that prefills these tokens while the decoding sequences go
        on."""
        replicas = self._replicas
        return replicas.decode_step.item(row) + replicas.c_prefill.item(row) * prompt_tokens

"""What a poll says of a replica, brought together with what this router sent there."""

from math import inf

import numpy as np

from extproc.fleet.peers import Peers
from extproc.fleet.tables import COSTS, Replicas, Requests
from extproc.predict.inputs import Floats, Indices
from extproc.predict.step import StepModel, profile_or_default
from extproc.replica_state import STALE_AFTER_S, ReplicaState

_SHORTEST_STEP = 1e-4  # seconds: no engine steps faster, whatever was learned
_LATE = 0.3  # seconds of a scrape after which others' load can no longer be told
_UNDER_WAY = 0.1  # seconds until a request reaches the engine, parsed and tokenized
_TOKENIZED = 5e-6  # the same for each token of its prompt


class Reconciliation:
    """Corrects a replica's row, and those of its requests, by what a poll saw.

    Requests sent since it was taken stay on top of what it saw.
    """

    def __init__(self, replicas: Replicas, requests: Requests, peers: Peers) -> None:
        self._replicas = replicas
        self._requests = requests
        self._peers = peers

    def set_hardware(self, row: int, state: ReplicaState, step: StepModel) -> None:
        """Sets step times and limits of a replica: those of its state, or else of its profile."""
        replicas, profile = self._replicas, profile_or_default(state.profile)
        for name in COSTS:
            getattr(replicas, name)[row] = getattr(step, name)
        replicas.c0[row] = max(step.c0, _SHORTEST_STEP)
        if not replicas.decode_step[row]:  # it has just joined, and nothing decodes
            replicas.decode_step[row] = replicas.c0[row]
        # A profile's limits are those of one engine; a prompt is on one of them.
        engines = max(state.engines, 1)
        capacity = float(state.kv_tokens or profile.kv_tokens * engines)
        replicas.kv_capacity[row] = capacity
        replicas.by_priority[row] = state.by_priority
        replicas.token_budget[row] = profile.token_budget * engines
        replicas.longest_prompt[row] = min(state.max_model_len or inf, capacity / engines)
        limit = state.max_num_seqs or max(profile.max_num_seqs * engines, state.running)
        replicas.max_num_seqs[row] = limit
        replicas.tokens_per_step[row] = state.tokens_per_step

    def restarted(self, row: int, steps: float) -> None:
        """The replica's process is a new one: its step count begins anew, and so does it here."""
        replicas, requests = self._replicas, self._requests
        mine = requests.replica == row
        requests.steps_before[mine] -= replicas.steps[row] - steps
        requests.until[mine] = 0.0
        replicas.steps[row] = replicas.polled_steps[row] = steps
        replicas.begun[row] = replicas.sent[row]
        replicas.polled_firsts[row] = 0.0

    def polled(self, row: int, state: ReplicaState, asked_at: float, now: float) -> Indices:
        """Sets steps, prefills and others' load right by a poll.

        Args:
            row: the replica's.
            state: what the poll saw, within ``state.scrape_seconds`` of being asked for.
            asked_at: when it was asked for, on the fleet's clock.
            now: seconds.

        Returns:
            The rows of the replica's requests.
        """
        requests = self._requests
        sampled_at = asked_at + state.scrape_seconds / 2
        mine: Indices = (requests.replica == row).nonzero()[0]
        self._correct_steps(row, mine, state.steps, now - sampled_at)
        order = mine[requests.turn[mine].argsort()]
        self._correct_prefills(row, order, state, asked_at, now)
        then = order[requests.sent_at[order] <= sampled_at]
        self._correct_external(row, then, state)
        self._correct_kv(row, then, state, now - sampled_at)
        self._replicas.sampled_at[row] = sampled_at
        return mine

    def _correct_steps(self, row: int, mine: Indices, polled: float, age: float) -> None:
        replicas, requests = self._replicas, self._requests
        busy = replicas.batch[row] > 0
        steps = polled + (age / replicas.decode_step[row] if busy else 0.0)
        shift = steps - replicas.steps[row]
        # Those that began since the last poll began at a count that was off by as much.
        since = mine[requests.steps_before[mine] > replicas.polled_steps[row] - 1.0]
        requests.steps_before[since] += shift
        requests.until[mine] = 0.0
        replicas.steps[row] = steps
        replicas.polled_steps[row] = polled

    def _correct_external(self, row: int, then: Indices, state: ReplicaState) -> None:
        """Tells what the poll saw beyond ``then``, the router's requests at that time, and those of
        the peers that count.

        Of these any number may run, and those without a token may wait: so much of the replica's
        queue is theirs, and the rest of it external.
        """
        replicas = self._replicas
        if in_time := state.scrape_seconds <= _LATE:
            known = sum(self._requests.parts[then].tolist()) + replicas.peers_parts.item(row)
            replicas.unattributed_before[row] = replicas.unattributed[row]
            replicas.unattributed[row] = state.running + state.waiting - known
            replicas.set_external()
        self._peers.polled(row, sequences=in_time)
        replicas.polled_waiting[row] = state.waiting
        replicas.polled_kv_usage[row] = state.kv_usage
        may_wait = replicas.queued.item(row) + replicas.peers_queued.item(row)
        waiting = min(max(state.waiting - may_wait, 0.0), replicas.external.item(row))
        prompt = (state.prompt_tokens - state.cached_tokens) / max(state.first_tokens, 1.0)
        replicas.external_backlog[row] = waiting * prompt

    def _correct_kv(self, row: int, then: Indices, state: ReplicaState, age: float) -> None:
        """What the poll saw beyond what the running ones of ``then``, and peers' requests, have.

        Those that came first run. The clock may take others for begun that were only on the way:
        they are not in what the poll saw, and will take their KV space all the same.
        """
        replicas, requests = self._replicas, self._requests
        others = replicas.peers_decoding.item(row) + replicas.external.item(row)
        run = then[requests.parts[then].cumsum() <= state.running - others]
        end, prefilled = requests.prompt_end[run], replicas.prefilled.item(row)
        begun = (requests.steps_before[run] < inf) & (end <= prefilled)
        whole = requests.weight[run] * (requests.each[run] + requests.generated[run])
        start = end - requests.prompt[run]
        part = np.clip(prefilled - self._prefill_rate(row) * age - start, 0.0, requests.prompt[run])
        known = float(np.where(begun, whole, part).sum()) + replicas.peers_kv.item(row)
        replicas.kv_unattributed[row] = state.kv_usage * replicas.kv_capacity.item(row) - known

    # -- prefills ---------------------------------------------------------------------------

    def _correct_prefills(
        self, row: int, order: Indices, state: ReplicaState, asked_at: float, now: float
    ) -> None:
        """Moves the prompt tokens that the clock takes for prefilled to where the poll allows.

        A replica counts the sequences that got their first token, and prefills in the order they
        came. So of the router's own sequences, numbered in that order, it is known up to which one
        the prompts were prefilled when the poll was taken (the count is exact while nobody else
        sends there), and that the next one was not: the clock may be ahead by the prompt in
        progress or, if that is more, by a step. Beside others' requests only the replica's queue
        tells: those it has admitted are prefilled but for the last prompt, or a step's worth, and
        those beyond what others sent are not. A poll tells nothing of what was sent since it was
        asked for.
        """
        replicas, requests = self._replicas, self._requests
        told = state.first_tokens > 0 or state.generated_tokens == 0
        theirs = replicas.peers_requests.item(row) + replicas.external.item(row)
        queued = max(state.waiting - theirs, 0.0)
        budget = replicas.token_budget.item(row)
        begun = self._count(row, order, state, queued, told and not theirs)
        admitted = self._admitted(row, order, state, asked_at, budget)
        surely = requests.turn[order[requests.prompt_end[order] <= admitted]]
        if len(surely) and surely[-1] > begun:  # some were given up, and never counted
            begun = replicas.begun[row] = surely.item(-1)

        ahead = order[requests.turn[order] > begun]
        least, most = replicas.enqueued.item(row), inf
        if len(ahead):
            first = ahead.item(0)
            end = requests.prompt_end.item(first)
            start = end - requests.prompt.item(first)
            least = max(start, admitted)
            if told and (queued or not theirs) and requests.sent_at[first] <= asked_at:
                rate = self._prefill_rate(row)
                most = max(end, start + budget, least) + rate * (now - asked_at)
        prefilled = min(max(replicas.prefilled.item(row), least), most)
        replicas.prefilled[row] = min(prefilled, replicas.enqueued.item(row))

    def _count(
        self, row: int, order: Indices, state: ReplicaState, queued: float, alone: bool
    ) -> float:
        """The number of the last sequence that has its first token.

        ``queued``: those of the router's own that the replica has not admitted, or preempted.
        """
        replicas, requests = self._replicas, self._requests
        known = replicas.known.item(row)
        firsts = state.first_tokens - replicas.polled_firsts.item(row)
        replicas.polled_firsts[row] = state.first_tokens
        if alone:
            # What was seen before the poll before is in the counts; what was seen since may not be.
            begun = max(replicas.begun.item(row) + firsts, replicas.known_before.item(row))
        else:
            started = order[requests.steps_before[order] < inf]
            begun = max(known, requests.turn.item(started[-1]) if len(started) else 0.0)
        begun = replicas.begun[row] = min(begun, replicas.sent.item(row) - queued)
        replicas.known_before[row] = known
        # Of several engines each has a queue of its own: one that has a token may have overtaken.
        return begun if state.engines > 1 else max(begun, known)

    def _admitted(
        self, row: int, order: Indices, state: ReplicaState, asked_at: float, budget: float
    ) -> float:
        """Prompt tokens that must be prefilled, as their requests have left the replica's queue.

        Of use are the first requests, that were surely among those running or waiting: vLLM says at
        the end of each step what was there when it began.
        """
        requests = self._requests
        under_way = _UNDER_WAY + 2.0 * self._step_with(row, budget)
        prompts = requests.each[order] * np.maximum(requests.weight[order], 1.0)
        late = requests.sent_at[order] + _TOKENIZED * prompts > asked_at - under_way
        settled = order[: late.argmax()] if late.any() else order
        turns: Floats = requests.turn[settled]
        most = turns[-1] - state.waiting if len(settled) else 0.0
        admitted = settled[: int(turns.searchsorted(most, "right"))]
        if not len(admitted):
            return 0.0
        last = admitted.item(-1)
        in_progress = max(budget, requests.prompt.item(last)) if state.running else 0.0
        return requests.prompt_end.item(last) - in_progress

    def _prefill_rate(self, row: int) -> float:
        chunk = self._replicas.chunk.item(row)
        return chunk / self._step_with(row, chunk)

    def _step_with(self, row: int, prompt_tokens: float) -> float:
        """Seconds of a step that prefills so many beside what decodes."""
        replicas = self._replicas
        return replicas.decode_step.item(row) + replicas.c_prefill.item(row) * prompt_tokens


def fade(replicas: Replicas, now: float) -> None:
    """Forgets external load on replicas whose polls are too old to tell."""
    sampled_at = replicas.sampled_at
    if len(replicas) and now - sampled_at[sampled_at.argmin()] > STALE_AFTER_S:
        old = now - sampled_at > STALE_AFTER_S
        sampled_at[old] = inf  # forgotten, once and for all
        replicas.unattributed_figures[:, old] = 0.0
        replicas.external[old] = replicas.external_backlog[old] = 0.0
        replicas.polled_waiting[old] = replicas.polled_kv_usage[old] = 0.0

"""What a poll says of a replica, brought together with the router's own ledger."""

from math import inf

from extproc.fleet.news import SILENT_AFTER_S
from extproc.fleet.prefills import correct_prefills
from extproc.fleet.tables import COSTS, Replicas, Requests
from extproc.predict.hardware import profile_or_default
from extproc.predict.inputs import Indices
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState

_SHORTEST_STEP = 1e-4
"""Seconds: no engine steps faster, whatever was learned of one that was always busy."""
_LATE = 0.3
"""Seconds of a scrape after which too much has ended since to tell what of it was others'."""
_MOST_PER_STEP = 8.0
"""Tokens that a sequence gets from a step, at most: drafts are longer, and seldom right so far."""
_NEARLY_FULL = 0.9
"""Fraction of the KV cache above which requests may be waiting for KV space."""
_ALL_DECODE = 0.95
"""Share of the tokens that a batch without prefill would have generated."""


def set_hardware(
    replicas: Replicas,
    row: int,
    state: ReplicaState,
    before: ReplicaState | None,
    step: StepModel,
) -> None:
    """Speed and limits of a replica: learned or said by itself, else its profile's.

    Args:
        replicas: the table.
        row: the replica's.
        state: what this poll saw.
        before: what the poll before saw, if there was one.
        step: its step times.
    """
    profile = profile_or_default(state.profile)
    for name in COSTS:
        getattr(replicas, name)[row] = getattr(step, name)
    replicas.c0[row] = max(step.c0, _SHORTEST_STEP)
    # A profile's limits are those of one engine; a prompt is on one of them.
    engines = max(state.engines, 1)
    capacity = float(state.kv_tokens or profile.kv_tokens * engines)
    replicas.kv_capacity[row] = capacity
    replicas.token_budget[row] = profile.token_budget * engines
    replicas.longest_prompt[row] = min(state.max_model_len or inf, capacity / engines)
    limit = max(profile.max_num_seqs * engines, state.running)
    if before is not None and before.running == state.running and _queues(before, state):
        limit = min(limit, state.running)
    replicas.max_num_seqs[row] = max(limit, 1)
    replicas.tokens_per_step[row] = 1.0
    if state.accepted_tokens > 0 and state.generated_tokens > 0:
        # Drafts count before they are cut at an answer's end: with short answers too many do.
        kept = 1.0 - state.accepted_tokens / state.generated_tokens
        replicas.tokens_per_step[row] = 1.0 / min(max(kept, 1.0 / _MOST_PER_STEP), 1.0)


def _queues(before: ReplicaState, after: ReplicaState) -> bool:
    """Requests wait, poll after poll, while KV space is left and all that run decode: the batch is
    full. (While a long prompt is prefilled, others wait for the token budget.)"""
    steps = after.steps - before.steps
    generated = after.generated_tokens - before.generated_tokens
    generated -= after.accepted_tokens - before.accepted_tokens
    waiting = all(state.waiting > 0 and state.kv_usage < _NEARLY_FULL for state in (before, after))
    return waiting and steps > 0 and generated >= _ALL_DECODE * steps * after.running


def restart(replicas: Replicas, requests: Requests, row: int, steps: float) -> None:
    """The replica's process is a new one: its step count begins anew, and so does it here."""
    mine = requests.replica == row
    requests.before[mine] -= replicas.steps[row] - steps
    requests.until[mine] = 0.0
    replicas.steps[row] = replicas.polled_steps[row] = steps
    replicas.begun[row] = replicas.sent[row]
    replicas.polled_firsts[row] = 0.0


def correct(
    replicas: Replicas,
    requests: Requests,
    row: int,
    state: ReplicaState,
    asked_at: float,
    now: float,
) -> Indices:
    """Sets steps, prefills and others' load right by a poll.

    Requests sent since it was taken stay on top of what it saw.

    Args:
        replicas: the table.
        requests: the table.
        row: the replica's.
        state: what the poll saw, within ``state.scrape_seconds`` of being asked for.
        asked_at: when it was asked for, on the fleet's clock.
        now: seconds.

    Returns:
        The rows of the replica's requests.
    """
    sampled_at = asked_at + state.scrape_seconds / 2
    mine: Indices = (requests.replica == row).nonzero()[0]
    _correct_steps(replicas, requests, row, mine, state.steps, now - sampled_at)

    correct_prefills(replicas, requests, row, mine, state, asked_at, now)

    then = mine[requests.sent_at[mine] <= sampled_at]
    weight = requests.weight[then]
    own = sum(requests.parts[then].tolist())
    beyond = max(state.running + state.waiting - own - replicas.others_parts.item(row), 0.0)
    if state.scrape_seconds <= _LATE:
        # A request that ended between the scrape and now is seen by one poll only.
        replicas.foreign[row] = min(beyond, replicas.beyond[row])
        replicas.beyond[row] = beyond
    replicas.polled_waiting[row] = state.waiting
    waiting = state.waiting - replicas.queued.item(row) - replicas.others_queued.item(row)
    prompt = (state.prompt_tokens - state.cached_tokens) / max(state.first_tokens, 1.0)
    replicas.foreign_backlog[row] = min(max(waiting, 0.0), replicas.foreign.item(row)) * prompt
    replicas.polled_kv_usage[row] = state.kv_usage
    started = requests.before[then] < inf
    own_kv = weight * (requests.each[then] + requests.generated[then])
    used = state.kv_usage * replicas.kv_capacity[row]
    known_kv = float(own_kv @ started) + replicas.others_kv.item(row)
    replicas.kv_beyond[row] = used - known_kv
    replicas.sampled_at[row] = sampled_at
    return mine


def fade(replicas: Replicas, now: float) -> None:
    """Forgets others' load on replicas whose polls are too old to tell."""
    sampled_at = replicas.sampled_at
    if len(replicas) and now - sampled_at[sampled_at.argmin()] > SILENT_AFTER_S:
        old = now - sampled_at > SILENT_AFTER_S
        for column in (
            replicas.beyond,
            replicas.foreign,
            replicas.foreign_backlog,
            replicas.kv_beyond,
            replicas.polled_waiting,
            replicas.polled_kv_usage,
        ):
            column[old] = 0.0
        sampled_at[old] = inf  # forgotten, once and for all


def _correct_steps(
    replicas: Replicas, requests: Requests, row: int, mine: Indices, polled: float, age: float
) -> None:
    busy = replicas.batch[row] > 0
    steps = polled + (age / replicas.decode_step[row] if busy else 0.0)
    shift = steps - replicas.steps[row]
    # Those that began since the last poll began at a count that was off by as much.
    since = mine[requests.before[mine] > replicas.polled_steps[row] - 1.0]
    requests.before[since] += shift
    requests.until[mine] = 0.0
    replicas.steps[row] = steps
    replicas.polled_steps[row] = polled

"""What a poll says of a replica, brought together with the router's own ledger."""

import numpy as np

from extproc.fleet.state import ReplicaState
from extproc.fleet.table import Table
from extproc.fleet.tables import COSTS
from extproc.predict.hardware import DEFAULT_PROFILE, PROFILES

_NEARLY_FULL = 0.9
"""Fraction of the KV cache above which requests may be waiting for KV space."""


def set_hardware(replicas: Table, row: int, state: ReplicaState) -> None:
    """The speed and the limits of a replica, from its profile and from what it says itself."""
    profile = PROFILES.get(state.profile) or PROFILES[DEFAULT_PROFILE]
    for name in COSTS:
        replicas[name][row] = getattr(profile.step, name)
    replicas["kv_capacity"][row] = state.kv_tokens or profile.kv_tokens
    replicas["token_budget"][row] = profile.token_budget
    # Requests that wait while KV space is left show the replica's own limit.
    limited = state.waiting > 0 and state.kv_usage < _NEARLY_FULL
    limit = min(profile.max_num_seqs, state.running) if limited else profile.max_num_seqs
    replicas["max_num_seqs"][row] = max(limit, 1)


def restart(replicas: Table, requests: Table, row: int, steps: float) -> None:
    """The replica's process is a new one: its step count begins anew, and so does it here."""
    mine = requests["replica"] == row
    requests["first_step"][mine] -= replicas["steps"][row] - steps
    replicas["steps"][row] = replicas["polled_steps"][row] = steps


def correct(
    replicas: Table, requests: Table, row: int, state: ReplicaState, sampled_at: float, now: float
) -> None:
    """Sets steps and others' load right by a poll whose figures were taken at ``sampled_at``.

    Requests sent since then stay on top of what the poll saw.
    """
    mine = np.flatnonzero(requests["replica"] == row)
    _correct_steps(replicas, requests, row, mine, state.steps, now - sampled_at)

    then = mine[requests["sent_at"][mine] <= sampled_at]
    beyond = state.running + state.waiting - len(then)
    # A request that ended between the scrape and now is seen by one poll only, so what two polls
    # in a row saw is somebody else's.
    replicas["foreign"][row] = max(min(beyond, replicas["foreign_seen"][row]), 0)
    replicas["foreign_seen"][row] = beyond
    replicas["foreign_waiting"][row] = max(min(state.waiting, replicas["foreign"][row]), 0)
    started = requests["first_step"][then] < np.inf
    own_kv = requests["prompt"][then] + requests["weight"][then] * requests["generated"][then]
    used = state.kv_usage * replicas["kv_capacity"][row]
    replicas["kv_foreign"][row] = used - float((own_kv * started).sum())
    replicas["sampled_at"][row] = sampled_at


def _correct_steps(
    replicas: Table, requests: Table, row: int, mine: "np.ndarray", polled: float, age: float
) -> None:
    busy = replicas["batch"][row] > 0
    steps = polled + (age / replicas["decode_step"][row] if busy else 0.0)
    shift = steps - replicas["steps"][row]
    # Those that began since the last poll began at a count that was off by as much.
    since = mine[requests["first_step"][mine] > replicas["polled_steps"][row]]
    requests["first_step"][since] += shift
    replicas["steps"][row] = steps
    replicas["polled_steps"][row] = polled

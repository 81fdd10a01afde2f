"""How unevenly requests lay on replicas."""

from collections.abc import Iterable, Mapping

import numpy as np

from extproc.predict.step import StepModel

_BATCH, _CONTEXT_TOKENS = 16, 1200
"""Of the decode step by which replicas' speeds are told: sequences, and tokens of each."""

Stay = tuple[str, float, float]
"""A request: the replica it was on, and from when to when, in seconds."""


def speed(step: StepModel) -> float:
    """Decode steps a second of a replica whose steps take so long."""
    return 1 / step.step_time(prefill=0, batch=_BATCH, kv=_BATCH * _CONTEXT_TOKENS)


def imbalance(stays: Iterable[Stay], speeds: Mapping[str, float]) -> float | None:
    """Requests on the replica that has the most for its share ÷ its share of all there are.

    A replica's share is its speed of the speeds of all. The mean over time, the more requests there
    are the more a moment counts: 1 where they always lie as the speeds do; None without requests.
    """
    rows = {name: row for row, name in enumerate(speeds)}
    changes = sorted(
        change
        for replica, start, end in stays
        if replica in rows
        for change in ((start, 1, rows[replica]), (end, -1, rows[replica]))
    )
    if not changes:
        return None
    at, by, on = np.array(changes).T
    steps = np.zeros((len(at), len(rows)))
    steps[np.arange(len(at)), on.astype(int)] = by
    there, lasting = steps.cumsum(axis=0)[:-1], np.diff(at)
    share = np.array([*speeds.values()]) / sum(speeds.values())
    return float(lasting @ (there / share).max(axis=1) / (lasting @ there.sum(axis=1)))

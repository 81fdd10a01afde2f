"""Replicas that joined others, and whose speed nobody has measured yet."""

from collections.abc import Container

import numpy as np

from extproc.predict.inputs import FleetView


def favour_idle(view: FleetView, newcomers: Container[str]) -> None:
    """Has idle newcomers taken for no slower than the median of the candidates.

    Of a newcomer only the profile is known, and by that it may look slow: so it is tried at all.
    """
    costs = view.costs
    columns = (view.decode_step, costs.c0, costs.c_prefill, costs.c_batch, costs.c_kv, costs.c_att)
    idle = [row for row in (view.requests == 0).nonzero()[0] if view.ids[row] in newcomers]
    if idle:
        for column in columns:
            column[idle] = np.minimum(column[idle], np.median(column))

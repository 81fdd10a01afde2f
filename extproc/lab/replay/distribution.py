"""What many times come to: the same figures for load, simulation and replay."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from extproc.predict.inputs import Floats

FIGURES = ("mean", "p50", "p95", "p99")


def distribution(seconds: Sequence[float] | Floats) -> dict[str, float] | None:
    """Those figures; None of nothing."""
    if not len(seconds):
        return None
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p95": p95, "p99": p99}


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float:
    """Spearman's."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (one, other)])
    return float(np.corrcoef(ranks)[0, 1])

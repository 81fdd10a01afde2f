"""Summary figures of times, and a progress bar."""

import sys
from collections.abc import Callable, Sequence

import numpy as np

from extproc.predict.inputs import Floats

FIGURES = ("mean", "p50", "p95", "p99")


def distribution(seconds: Sequence[float] | Floats) -> dict[str, float] | None:
    """Return mean and percentiles; None if there are no times."""
    if not len(seconds):
        return None
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p95": p95, "p99": p99}


def progress(label: str) -> Callable[..., None]:
    """Return a function ``show(done, note="")`` that draws a progress bar on a terminal. ``done``:
    share 0…1; 1 removes the bar."""
    shown = ""

    def show(done: float, note: str = "") -> None:
        nonlocal shown
        text = f"{label} {'█' * int(25 * done):·<25} {int(100 * done)}% {note}"
        if text != shown:
            shown = text
            end = "\r\033[K" if done >= 1 else "\033[K"
            print(f"\r{text}{end}", end="", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda done, note="": None

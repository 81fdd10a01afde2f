"""A progress bar where somebody looks."""

import sys
from collections.abc import Callable


def progress(label: str) -> Callable[..., None]:
    """Returns ``show(done, note="")``; ``done`` is a share, 0…1.

    The bar is on stderr, and gone when all is done. Where stderr is no terminal, nothing is shown.
    """
    shown = ""

    def show(done: float, note: str = "") -> None:
        nonlocal shown
        text = f"{label} {'█' * int(25 * done):·<25} {int(100 * done)}% {note}"
        if text != shown:
            shown = text
            end = "\r\033[K" if done >= 1 else "\033[K"
            print(f"\r{text}{end}", end="", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda done, note="": None

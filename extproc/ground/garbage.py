"""Garbage collection that skips objects which live as long as the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_garbage() -> Iterator[None]:
    """Exempts all objects that exist at the end of the block, such as modules, from collection.

    Otherwise garbage collection during the imports, and the first full collection after them,
    would take a tenth of the time that a router needs to start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

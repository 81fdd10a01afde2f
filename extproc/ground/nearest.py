"""What somebody meant who wrote a name that nothing has."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

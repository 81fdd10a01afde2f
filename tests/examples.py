"""Number of examples of property tests that need more or fewer than the others."""

from hypothesis import settings

_USUAL = 100  # examples of the profile "tests"


def examples(count: int) -> int:
    """Returns ``count``; the profile "fast" has as few in proportion as for other tests."""
    return count * settings().max_examples // _USUAL

"""Number of examples of property tests that need more or fewer than the others."""

from hypothesis import settings

_USUAL = 100  # examples of the profile "tests"


def examples(count: int) -> int:
    """Scales ``count`` to the profile of the run, because the profile "fast" has fewer examples."""
    return count * settings().max_examples // _USUAL

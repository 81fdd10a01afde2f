"""A replay and its answer as a page with pictures: one HTML file that needs nothing else."""

from extproc.replay.what_if import Answer, Replayed


def page(replayed: Replayed, answer: Answer | None) -> str:
    """The page."""
    return ""

"""How much of requests' bodies a router holds."""

MOST_HELD = 256 * 2**20
"""Bytes: 32 of the largest bodies that are held, or some 70,000 usual prompts."""


class Room:
    """Memory that all streams of a process share for what they hold back.

    In full duplex a body waits in the router for its end, and clients may let it wait.
    """

    def __init__(self, size: int = MOST_HELD) -> None:
        """Takes the bytes there are."""
        self.free = size

    def take(self, size: int) -> bool:
        """Whether there was room for so many bytes; then they are taken."""
        if size > self.free:
            return False
        self.free -= size
        return True

    def give_back(self, size: int) -> None:
        """So many bytes are held no longer."""
        self.free += size

"""Time that the simulation sets."""


class VirtualClock:
    """Reads as it was last set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.time

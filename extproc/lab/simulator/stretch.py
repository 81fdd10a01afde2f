"""Step times in closed form, for as long as only the same sequences decode."""

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps over the same decoding sequences: each takes a little longer than the one before.

    All end times are computed from its start, so that it does not matter in how many pieces it
    is run.
    """

    starts_at: float
    first_step: int
    step_time: float
    growth: float

    def end(self, step: int) -> float:
        """When step number ``step`` ends."""
        steps = step - self.first_step + 1
        return self.starts_at + steps * (self.step_time + self.growth * (steps - 1) / 2)

    def last_until(self, until: float) -> int:
        """The last step that ends by ``until``, which must be finite."""
        time = max(until - self.starts_at, 0.0)
        linear = self.step_time - self.growth / 2
        steps = int(2 * time / (linear + sqrt(linear * linear + 2 * self.growth * time)))
        step = self.first_step + steps - 1
        while self.end(step) > until:
            step -= 1
        while self.end(step + 1) <= until:
            step += 1
        return step

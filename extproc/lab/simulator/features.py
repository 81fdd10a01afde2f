"""Optional features of an engine: LoRA adapters and speculative decoding."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from random import Random


class Adapters:
    """A batch has at most ``slots`` adapters, and as many stay loaded after their last use.

    A step whose batch has one that is not loaded takes ``load_s`` longer for it; the one that was
    used the longest ago is dropped for it.
    """

    def __init__(self, slots: int = 1, load_s: float = 0.0) -> None:
        self.slots = slots
        self.loads = 0  # how often one was loaded
        self._load_s = load_s
        self._loaded: OrderedDict[str, None] = OrderedDict()

    def admits(self, adapter: str, batch: Collection[str]) -> bool:
        """Tells whether a sequence of that adapter may join a batch with these adapters."""
        return adapter in batch or len(batch) < self.slots

    def use(self, adapters: Iterable[str]) -> float:
        """A step uses these; returns the seconds it takes to load those that are not loaded."""
        loads = self.loads
        for adapter in adapters:
            self.loads += adapter not in self._loaded
            self._loaded[adapter] = None
            self._loaded.move_to_end(adapter)
        while len(self._loaded) > self.slots:
            self._loaded.popitem(last=False)
        return (self.loads - loads) * self._load_s


ACCEPTANCE = 0.7
"""Probability unless another is given: about what vLLM reports of EAGLE drafts on conversations."""


class Speculation:
    """In each step ``tokens`` are drafted for every sequence that decodes.

    A drafted token is accepted with the same probability whatever it is, as long as all before it
    were: a step gives a sequence one token and those accepted, ``tokens + 1`` at most.
    """

    def __init__(self, tokens: int, acceptance: float, random: Random) -> None:
        """Raises ValueError: there is nothing to draft, or ``acceptance`` is no probability."""
        if tokens < 1 or not 0 <= acceptance <= 1:
            raise ValueError(f"{tokens} draft tokens accepted with probability {acceptance}")
        self.tokens = tokens
        self._acceptance = acceptance
        self._random = random

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens a sequence gets from a step: 1 + a + a² + … with acceptance a."""
        return sum(self._acceptance**drafted for drafted in range(self.tokens + 1))

    def accepted(self) -> int:
        accepted = 0
        while accepted < self.tokens and self._random.random() < self._acceptance:
            accepted += 1
        return accepted

"""Optional features of an engine: LoRA adapters, speculative decoding, a cold start."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random


class LoadedAdapters:
    """LoRA adapters in the slots of an engine: those of the batch, and those that stay loaded after
    their last use.

    A step takes ``load_s`` seconds longer for each adapter that it has to load. If no slot is free,
    the least recently used adapter is unloaded.
    """

    def __init__(self, slots: int, load_s: float) -> None:
        self.slots = slots
        self._load_s = load_s
        self._loaded: OrderedDict[str, None] = OrderedDict()

    def admits(self, adapter: str, batch: Collection[str]) -> bool:
        """Return True if a sequence with ``adapter`` may join a batch that uses these adapters."""
        return adapter in batch or len(batch) < self.slots

    def use(self, adapters: Iterable[str]) -> float:
        """Use adapters in a step; return the seconds that loading the missing adapters takes."""
        loads = 0
        for adapter in adapters:
            loads += adapter not in self._loaded
            self._loaded[adapter] = None
            self._loaded.move_to_end(adapter)
        while len(self._loaded) > self.slots:
            self._loaded.popitem(last=False)
        return loads * self._load_s


COLD = 2.0
"""Factor of a cold step's time. On a CPU the first step of vLLM 0.32 takes twice as long as later
steps, and the first prompt of each length 1.02 to 1.17 times as long as later ones. A GPU that
compiles kernels may take seconds longer."""

ACCEPTANCE = 0.7  # about as vLLM reports for EAGLE drafts in conversations


@dataclass(eq=False)
class Speculation:
    """Speculative decoding: each step drafts ``tokens`` tokens for every decoding sequence.

    A drafted token is accepted with a fixed probability if all drafted tokens before it were. So a
    step gives a sequence one token plus the accepted ones, at most ``tokens + 1``.
    """

    tokens: int
    _acceptance: float
    _random: Random

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a sequence in a step: 1 + a + … + a**tokens with acceptance a."""
        return sum(self._acceptance**drafted for drafted in range(self.tokens + 1))

    def accepted(self) -> int:
        accepted = 0
        while accepted < self.tokens and self._random.random() < self._acceptance:
            accepted += 1
        return accepted

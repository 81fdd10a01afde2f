"""LoRA adapters of an engine, kept as vLLM V1 does (``vllm/lora/worker_manager.py``)."""

from collections import OrderedDict
from collections.abc import Collection, Iterable


class Adapters:
    """A batch has at most ``slots`` adapters, and as many stay loaded after their last use.

    A step whose batch has one that is not loaded takes ``load_s`` longer for it; the one that was
    used the longest ago is dropped for it.
    """

    def __init__(self, slots: int = 1, load_s: float = 0.0) -> None:
        self.slots = slots
        self.loads = 0
        """How often one was loaded."""
        self._load_s = load_s
        self._loaded: OrderedDict[str, None] = OrderedDict()

    def admits(self, adapter: str, batch: Collection[str]) -> bool:
        """Whether a sequence of that adapter may join a batch with these."""
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

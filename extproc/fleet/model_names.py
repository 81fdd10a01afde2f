"""Names that clients ask for, and names under which replicas serve them."""

from collections.abc import Container, Iterable, Mapping
from random import Random
from types import MappingProxyType

Targets = tuple[str, ...] | dict[str, float]
"""What a name stands for: names of one model on different replicas, or models to draw from by
weight."""


class ModelNames:
    """The configured names. Any other name is what replicas serve."""

    def __init__(self, models: Mapping[str, Targets] = MappingProxyType({})) -> None:
        self._lists = {name: one for name, one in models.items() if isinstance(one, tuple)}
        self._draws = {name: one for name, one in models.items() if isinstance(one, dict)}

    def served(self, model: str) -> tuple[str, ...]:
        """Under which names replicas serve a model."""
        return self._lists.get(model) or (model,)

    def known(self, model: str, names: Container[str]) -> str | None:
        """The first of them that is among ``names``, those that a replica serves."""
        return next((name for name in self.served(model) if name in names), None)

    def askable(self, served: Iterable[str]) -> list[str]:
        """What clients may ask for where replicas serve these names: the configured first."""
        there = set(served)
        lists = {name for name in self._lists if self.known(name, there) is not None}
        draws = {name for name, weights in self._draws.items() if (there | lists) & weights.keys()}
        return list(dict.fromkeys((*sorted(lists | draws), *sorted(there))))

    def models(self, asked: str) -> tuple[str, ...]:
        """The models that a request for a name may be for."""
        return tuple(self._draws.get(asked, (asked,)))

    def draw(self, asked: str, among: Iterable[str], random: Random) -> str:
        """One of the models that a request for a name may be for, by their weights.

        Args:
            asked: the name in the request.
            among: those of them that can be served now.
            random: draws.
        """
        weights = self._draws.get(asked, {asked: 1.0})
        drawn = {model: weights[model] for model in among if weights[model]} or weights
        return random.choices(list(drawn), list(drawn.values()))[0]

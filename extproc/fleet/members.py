"""The replicas of the pool: where each stands in the tables, what it serves by which name, and
which fell silent."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType

from extproc.replica_state import STALE_AFTER_S, ReplicaState

Targets = tuple[str, ...] | dict[str, float]
"""What a name stands for: names of one model on different replicas, or models to draw from by
weight."""


class ModelNames:
    """The configured names. Any other name is what replicas serve."""

    def __init__(self, models: Mapping[str, Targets] = MappingProxyType({})) -> None:
        self._lists = {name: one for name, one in models.items() if isinstance(one, tuple)}
        self._draws = {name: one for name, one in models.items() if isinstance(one, dict)}

    def served(self, model: str) -> tuple[str, ...]:
        return self._lists.get(model) or (model,)

    def known(self, model: str, names: Container[str]) -> str | None:
        """The first of them that is among ``names``, those that a replica serves."""
        return next((name for name in self.served(model) if name in names), None)

    def requestable(self, served: Iterable[str]) -> list[str]:
        """What clients may ask for where replicas serve these names: the configured first."""
        there = set(served)
        lists = {name for name in self._lists if self.known(name, there) is not None}
        draws = {name for name, weights in self._draws.items() if (there | lists) & weights.keys()}
        return list(dict.fromkeys((*sorted(lists | draws), *sorted(there))))

    def models(self, asked: str) -> tuple[str, ...]:
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


MODELS_REMEMBERED, REMEMBERED_S = 1000, 3600.0  # models that departed, for so many seconds


class Members:
    """What the last poll said of each, by its ``ip:port`` and by the row it has in the tables."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self.rows: dict[str, int] = {}
        self.by_row: list[ReplicaState] = []  # departed ones stay until the row is reused
        self.departed_models: dict[str, float] = {}
        """Models that a replica served and serves no more → when that was, seconds on the clock."""

    def __contains__(self, replica: object) -> bool:
        return replica in self.rows

    def __iter__(self) -> Iterator[ReplicaState]:
        return (self.by_row[row] for row in self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, replica: str) -> ReplicaState | None:
        """What the last poll said of a replica; None where it is no member."""
        row = self.rows.get(replica)
        return None if row is None else self.by_row[row]

    def departed(self, replica: str) -> int | None:
        """The row of one that was a member before, where nobody else has it by now."""
        return next((row for row, one in enumerate(self.by_row) if one.id == replica), None)

    @property
    def only_model(self) -> str | None:
        """The model that members serve, where all that say serve the same; else None."""
        served = {state.models for state in self if state.models}
        names = served.pop() if len(served) == 1 else ()
        return names[0] if names else None

    @property
    def models(self) -> list[str]:
        kinds = {state.models for state in self}
        return self.names.requestable(name for models in kinds for name in models)

    def models_on(self, replica: str) -> tuple[str, ...]:
        """Names of models that a replica serves; none where it does not tell, or is no member."""
        state = self.get(replica)
        return () if state is None else state.models

    def models_removed(self, before: Sequence[str], now: float, after: Sequence[str] = ()) -> None:
        """Remember the models that a replica serves no more; of a thousand, those of late."""
        for model in before:
            if model not in after:
                self.departed_models.pop(model, None)
                self.departed_models[model] = now
        while len(self.departed_models) > MODELS_REMEMBERED:
            del self.departed_models[next(iter(self.departed_models))]

    def recall(self, departed: Mapping[str, float]) -> None:
        """Adds models that departed before this router started."""
        both = sorted({**departed, **self.departed_models}.items(), key=lambda pair: pair[1])
        self.departed_models = dict(both[-MODELS_REMEMBERED:])

    def served_lately(self, model: str, now: float) -> bool:
        """Return True if a member serves a model, well or not, or one did within the last hour."""
        lately = {name for name, at in self.departed_models.items() if now - at < REMEMBERED_S}
        known = self.names.known
        return known(model, lately) is not None or any(
            known(model, state.models) is not None for state in self
        )

    def name_on(self, replica: str, model: str) -> str:
        known = self.names.known(model, self.models_on(replica))
        return known or self.names.served(model)[0]

    def all_serve(self, name: str) -> bool:
        return all(name in state.models for state in self)

    @property
    def all_take_priority(self) -> bool:
        """Whether every member takes ``priority`` in a body, so that a retry anywhere is taken."""
        return all(state.takes_priority for state in self if state.listed or state.healthy)


class Staleness:
    """Notes when news of each replica came.

    When nothing at all is heard, pollers or Redis are gone: the replicas are still there. So one
    is silent only beside others that are heard of.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = self._since = now  # when the last news of any came; at first, the start
        self._heard: dict[str, float] = {}

    def updated(self, replica: str, now: float) -> None:
        if now - self.heard_at > STALE_AFTER_S:
            self._since = now
        self.heard_at = self._heard[replica] = now

    def forget(self, replica: str) -> None:
        self._heard.pop(replica, None)

    def stale(self, after: float) -> list[str]:
        """Replicas not heard of for more than ``after`` seconds, in which others were without a
        break."""
        if self.heard_at - self._since < after:
            return []
        now = max(self._heard.values(), default=0.0)
        return [name for name, at in self._heard.items() if now - at > after]

"""Members of the pool: their rows in the tables, the models that they serve, and stale ones."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from math import inf
from operator import itemgetter
from random import Random
from types import MappingProxyType

from extproc.ground.address import with_name
from extproc.replica_state import STALE_AFTER_S, ReplicaState

Targets = tuple[str, ...] | dict[str, float]
"""Meaning of a configured model name: the names of one model on different replicas, or models to
draw from by weight."""

MODELS_REMEMBERED, REMEMBERED_S = 1000, 3600.0
"""Limits for remembering models that a replica no longer serves: their number, and seconds."""


class ModelNames:
    """Configured model names; any other name in a request is taken as one that replicas serve."""

    def __init__(self, models: Mapping[str, Targets] = MappingProxyType({})) -> None:
        self._lists = {name: to for name, to in models.items() if isinstance(to, tuple)}
        self._draws = {name: to for name, to in models.items() if isinstance(to, dict)}

    def served(self, model: str) -> tuple[str, ...]:
        return self._lists.get(model) or (model,)

    def known(self, model: str, names: Container[str]) -> str | None:
        """Returns the first of the model's names that is among a replica's ``names``."""
        return next((name for name in self.served(model) if name in names), None)

    def named(self, model: str, names: Container[str]) -> str:
        """Returns :meth:`known`, or the model's first name if no name of it is among ``names``."""
        return self.known(model, names) or self.served(model)[0]

    def requestable(self, served: Iterable[str]) -> list[str]:
        """Returns the names that clients may request if replicas serve ``served``, configured names
        first."""
        there = set(served)
        lists = {name for name in self._lists if self.known(name, there) is not None}
        draws = {name for name, weights in self._draws.items() if (there | lists) & weights.keys()}
        return list(dict.fromkeys((*sorted(lists | draws), *sorted(there))))

    def models(self, requested: str) -> tuple[str, ...]:
        return tuple(self._draws.get(requested, (requested,)))

    def draw(self, requested: str, among: Iterable[str], random: Random) -> str:
        """Draws one of the models that a requested name stands for, by the configured weights.
        ``among``: those of these models that can be served now; empty: draw among all of them."""
        weights = self._draws.get(requested, {requested: 1.0})
        drawn = {model: weights[model] for model in among if weights[model]} or weights
        return random.choices(list(drawn), list(drawn.values()))[0]


class Members:
    """Last polled state of each replica, by ``ip:port`` and by row of the tables."""

    def __init__(self, names: ModelNames) -> None:
        self.names = names
        self.rows: dict[str, int] = {}
        self.by_row: list[ReplicaState] = []  # a departed replica stays until its row is reused
        self.departed_models: dict[str, float] = {}  # listed by no member → since when
        self._lists = Counter[tuple[str, ...]]()  # members by their list of models
        self._listing = Counter[str]()  # members that list each model

    def __contains__(self, replica: object) -> bool:
        return replica in self.rows

    def __iter__(self) -> Iterator[ReplicaState]:
        return (self.by_row[row] for row in self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, replica: str) -> ReplicaState | None:
        row = self.rows.get(replica)
        return None if row is None else self.by_row[row]

    @property
    def only_model(self) -> str | None:
        """First model in the list that members share; None: their lists differ, or no member has a
        list."""
        lists = [models for models in self._lists if models]
        return lists[0][0] if len(lists) == 1 else None

    @property
    def models(self) -> list[str]:
        """Names that clients may request."""
        return self.names.requestable(self._listing)

    def title(self, replica: str) -> str:
        """Returns ``name (ip:port)`` of a replica, for people."""
        state = self.get(replica)
        return with_name(replica, "" if state is None else state.name)

    def models_on(self, replica: str) -> tuple[str, ...]:
        state = self.get(replica)
        return () if state is None else state.models

    def relisted(self, before: tuple[str, ...], after: tuple[str, ...], now: float) -> None:
        """Counts a member that lists the models ``after`` instead of ``before``; an empty list
        counts as none. Lists may have thousands of LoRA adapters, so no list is searched."""
        if before != after:
            for models, sign in ((after, 1), (before, -1)):
                self._lists[models] += sign
                self._listing.update(dict.fromkeys(models, sign))
            self._lists, self._listing = +self._lists, +self._listing  # drops zeros
            self.models_departed(dict.fromkeys(before, now))

    def models_departed(self, times: Mapping[str, float]) -> None:
        """Remembers since when no member has listed each of these models. The latest time counts;
        it may be from before this router started."""
        known = self.departed_models | {
            model: max(at, self.departed_models.get(model, -inf)) for model, at in times.items()
        }
        departed = ((model, at) for model, at in known.items() if model not in self._listing)
        self.departed_models = dict(sorted(departed, key=itemgetter(1))[-MODELS_REMEMBERED:])

    def unknown(self, model: str) -> bool:
        """Returns True if every member lists its models, and none lists this model."""
        if self.names.known(model, self._listing) is not None or not self.rows:
            return False
        return all(state.listed for state in self)

    def served_lately(self, model: str, now: float) -> bool:
        """Returns True if a member lists the model, or if a replica listed it within the last
        hour."""
        return any(
            name in self._listing or now - self.departed_models.get(name, -inf) < REMEMBERED_S
            for name in self.names.served(model)
        )

    @property
    def all_take_priority(self) -> bool:
        """True if every member accepts ``priority`` in a body, so that any retry is accepted."""
        return all(state.takes_priority for state in self if state.listed or state.healthy)


class Staleness:
    """Times of the last update of each replica.

    If no replica at all is updated, pollers or Redis are down, and the replicas probably still run.
    So a replica is stale only while other replicas are updated.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = self._since = now  # last update of any replica; at first, the start
        self._updated_at: dict[str, float] = {}

    def updated(self, replica: str, now: float) -> None:
        if now - self.heard_at > STALE_AFTER_S:
            self._since = now
        self.heard_at = self._updated_at[replica] = now

    def forget(self, replica: str) -> None:
        self._updated_at.pop(replica, None)

    def stale(self, after: float) -> list[str]:
        """Returns the replicas without an update for more than ``after`` seconds, if other
        replicas were updated all that time."""
        if self.heard_at - self._since < after:
            return []
        return [name for name, at in self._updated_at.items() if self.heard_at - at > after]

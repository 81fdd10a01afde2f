"""What is served: encoded resources by type and name."""

import asyncio
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

_TYPES = "type.googleapis.com/envoy.config"
CLUSTERS = f"{_TYPES}.cluster.v3.Cluster"
ENDPOINTS = f"{_TYPES}.endpoint.v3.ClusterLoadAssignment"
LISTENERS = f"{_TYPES}.listener.v3.Listener"
ROUTES = f"{_TYPES}.route.v3.RouteConfiguration"

WILDCARDS = frozenset({CLUSTERS, LISTENERS})
"""Types of which Envoy takes all there are when it names none."""


@dataclass(frozen=True)
class Selection:
    """Resources that one subscriber asked for, by name."""

    resources: Mapping[str, bytes]

    @cached_property
    def version(self) -> str:
        """A hash of them: the same from every server, and after a restart."""
        digest = hashlib.sha256()
        for _, resource in sorted(self.resources.items()):
            digest.update(len(resource).to_bytes(8) + resource)
        return digest.hexdigest()[:16]


class Catalog:
    """Resources of each type by name, None where one is not known yet."""

    def __init__(self) -> None:
        self._resources: dict[str, dict[str, bytes | None]] = {}
        self._watchers: set[asyncio.Event] = set()

    def replace(self, type_url: str, resources: Mapping[str, bytes | None]) -> None:
        """Serve these of the type and no others; wakes the watchers where that is a change."""
        if self._resources.get(type_url) != resources:
            self._resources[type_url] = dict(resources)
            for watcher in self._watchers:
                watcher.set()

    def replace_all(self, resources: Mapping[str, Mapping[str, bytes]]) -> None:
        """The same for several types."""
        for type_url, named in resources.items():
            self.replace(type_url, named)

    def names(self, type_url: str) -> Collection[str]:
        """Of a type, also those that are not known yet."""
        return self._resources.get(type_url, {}).keys()

    def select(self, type_url: str, names: Collection[str]) -> Selection | None:
        """The named resources, or all; None where there is nothing to tell yet.

        That there are none any more is told of clusters and listeners alone: of other types Envoy
        keeps what is missing.
        """
        if (known := self._resources.get(type_url)) is None:
            return None
        if type_url in WILDCARDS and (not names or "*" in names):
            names = known
        found = {name: value for name in names if (value := known.get(name)) is not None}
        return Selection(found) if found or type_url in WILDCARDS else None

    @contextmanager
    def watched_by(self, watcher: asyncio.Event) -> Iterator[None]:
        """The watcher is woken at every change within the block."""
        self._watchers.add(watcher)
        try:
            yield
        finally:
            self._watchers.discard(watcher)

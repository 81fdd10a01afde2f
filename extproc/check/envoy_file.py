"""An Envoy file as the rules see it."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from betterproto2 import Message
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.route.v3 import RouteAction
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost

from extproc.check.schema import message
from extproc.check.tree import Node, Path, nodes, written

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A typed message and where it stands in the file."""

    path: Path
    message: T

    @property
    def where(self) -> str:
        """The path as people write it."""
        return written(self.path)


class EnvoyFile:
    """Finds the parts of a bootstrap, of a fragment of one, or of a patch for a mesh.

    The file must meet the schema (:func:`extproc.check.schema.problems`).
    """

    def __init__(self, tree: object) -> None:
        self.nodes: tuple[Node, ...] = tuple(nodes(tree))

    def has(self, cls: type[Any]) -> bool:
        """Whether there is a message of that type."""
        return any(node.type == _full_name(cls) for node in self.nodes)

    def all(self, cls: type[M], within: Part[Any] | None = None) -> list[Part[M]]:
        """Every message of that type, in the whole file or within one part of it."""
        root = within.path if within else ()
        return [
            Part(node.path, message(cls, node))
            for node in self.nodes
            if node.type == _full_name(cls) and node.path[: len(root)] == root
        ]

    @property
    def router_clusters(self) -> list[Part[Cluster]]:
        """Clusters of ext_proc servers: those that the filters name."""
        names = {
            part.message.grpc_service.envoy_grpc.cluster_name
            for part in self.all(ExternalProcessor)
            if part.message.grpc_service and part.message.grpc_service.envoy_grpc
        }
        return [part for part in self.all(Cluster) if part.message.name in names]

    @property
    def replica_clusters(self) -> list[Part[Cluster]]:
        """Clusters that obey the router's choice."""
        return [part for part in self.all(Cluster) if self.all(OverrideHost, within=part)]

    @property
    def replica_routes(self) -> list[Part[RouteAction]]:
        """Routes to those clusters; all routes where the file holds no such cluster."""
        names = {part.message.name for part in self.replica_clusters}
        routes = self.all(RouteAction)
        return [part for part in routes if not names or _clusters(part.message) & names]

    def removes_before(self, filter: Part[ExternalProcessor], header: str) -> bool:
        """Whether a client's header is gone before a request reaches that filter."""
        if any(_removes(part.message.mutations, header) for part in self.all(EarlyHeaderMutation)):
            return True
        return any(
            _precedes(part.path, filter.path)
            for part in self.all(HeaderMutation)
            if part.message.mutations and _removes(part.message.mutations.request_mutations, header)
        )


def _full_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__name__}".partition(".")[2]


def _clusters(route: RouteAction) -> set[str | None]:
    weighted = route.weighted_clusters.clusters if route.weighted_clusters else []
    return {route.cluster, *(cluster.name for cluster in weighted)}


def _removes(mutations: list[Mutation], header: str) -> bool:
    return any(one.remove is not None and one.remove.lower() == header for one in mutations)


def _precedes(first: Path, second: Path) -> bool:
    """Whether a filter comes before another; filters in separate patches are believed to."""
    *list_of_first, index, _ = first
    *list_of_second, other, _ = second
    if list_of_first == list_of_second and isinstance(index, int) and isinstance(other, int):
        return index < other
    return True

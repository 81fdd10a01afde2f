"""An Envoy file as the rules see it."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from betterproto2 import Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.route.v3 import RouteAction
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost

from extproc.check.schema import message
from extproc.check.tree import Node, Path, nodes, snake, written

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
    def has_all_clusters(self) -> bool:
        """Whether it is a whole bootstrap that takes no clusters from a control plane."""
        dynamic = [part.message.dynamic_resources for part in self.all(Bootstrap)]
        return bool(dynamic) and not any(
            one and (one.cds_config or one.cds_resources_locator) for one in dynamic
        )

    @property
    def cluster_names(self) -> set[str]:
        """Names of the clusters in it."""
        return {part.message.name for part in self.all(Cluster)}

    @property
    def router_clusters(self) -> list[Part[Cluster]]:
        """Clusters of ext_proc servers: those that the filters name."""
        names = {router_cluster(part.message) for part in self.all(ExternalProcessor)} - {""}
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
        return [part for part in routes if not names or clusters_of(part.message) & names]

    def is_enabled(self, filter: Part[ExternalProcessor]) -> bool:
        """Whether requests pass that filter: its entry is not disabled, or a route enables it."""
        entries = [
            part.message
            for part in self.all(HttpFilter)
            if part.path == filter.path[: len(part.path)] and part.message.disabled
        ]
        return all(self._enabled_by_a_route(entry.name) for entry in entries)

    def _enabled_by_a_route(self, name: str) -> bool:
        return any(
            [snake(str(part)) for part in node.path[-2:-1]] == ["typed_per_filter_config"]
            and node.path[-1] == name
            and not node.fields.get("disabled")
            for node in self.nodes
        )

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


def router_cluster(filter: ExternalProcessor) -> str:
    """Name of the cluster of ext_proc servers; empty where the filter names none."""
    service = filter.grpc_service
    return service.envoy_grpc.cluster_name if service and service.envoy_grpc else ""


def clusters_of(route: RouteAction) -> set[str]:
    """Names of the clusters a route leads to; none where a header or a plugin says."""
    weighted = route.weighted_clusters.clusters if route.weighted_clusters else []
    return {name for name in (route.cluster, *(one.name for one in weighted)) if name}


def _removes(mutations: list[Mutation], header: str) -> bool:
    return any(one.remove is not None and one.remove.lower() == header for one in mutations)


def _precedes(first: Path, second: Path) -> bool:
    """Whether a filter comes before another; filters in separate patches are believed to."""
    *list_of_first, index, _ = first
    *list_of_second, other, _ = second
    if list_of_first == list_of_second and isinstance(index, int) and isinstance(other, int):
        return index < other
    return True

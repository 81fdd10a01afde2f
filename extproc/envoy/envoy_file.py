"""An Envoy file as the rules see it, and the router beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from betterproto2 import Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap, BootstrapDynamicResources
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.route.v3 import FilterConfig, RouteAction
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer, BufferPerRoute
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost

from extproc.config import Config
from extproc.envoy.choice import follows_header, is_destination, reads_header, reads_metadata
from extproc.envoy.file import Part, Parts, Path, snake

_OVERRIDABLE = (
    "processing_mode",
    "response_attributes",
    "grpc_service",
    "metadata_options",
    "failure_mode_allow",
)

Said = Part[FilterConfig] | Part[ExtProcPerRoute] | Part[BufferPerRoute]
"""What a route says of a filter."""


class EnvoyFile(Parts):
    """Finds the parts of a bootstrap, of a fragment of one, or of a patch for a mesh.

    What it says holds for a file that meets the schema, without errors among its ``findings``.
    """

    def __init__(self, tree: object, config: Config | None = None) -> None:
        """``config``: of the router that this Envoy asks; None: all by default."""
        super().__init__(tree)
        self.config = config or Config()

    @property
    def has_all_clusters(self) -> bool:
        """Whether it is a whole bootstrap that takes no clusters from a control plane."""
        dynamic = [part.message for part in self.all(BootstrapDynamicResources)]
        elsewhere = any(one.cds_config or one.cds_resources_locator for one in dynamic)
        return self.has(Bootstrap) and not elsewhere

    @property
    def takes_listeners(self) -> bool:
        """Whether it is a bootstrap that takes listeners from a control plane."""
        dynamic = [part.message for part in self.all(BootstrapDynamicResources)]
        return any(one.lds_config or one.lds_resources_locator for one in dynamic)

    @property
    def cluster_names(self) -> set[str]:
        """Names of the clusters in it."""
        return {part.message.name for part in self.all(Cluster)}

    @property
    def router_clusters(self) -> list[Part[Cluster]]:
        """Clusters of ext_proc servers: those that the filters name."""
        names = {router_cluster(part.message) for part in self.filters} - {""}
        return [part for part in self.all(Cluster) if part.message.name in names]

    @property
    def replica_clusters(self) -> list[Part[Cluster]]:
        """Clusters that obey the router's choice, in one of the :mod:`~extproc.envoy.choice`."""
        return [
            part
            for part in self.all(Cluster)
            if self.all(OverrideHost, within=part) or is_destination(part.message)
        ]

    @property
    def reads_header(self) -> bool:
        """Whether a cluster goes by the header, which a client could set as well."""
        return any(reads_header(part.message) for part in self.all(OverrideHost)) or any(
            follows_header(part.message) for part in self.all(Cluster)
        )

    @property
    def reads_metadata(self) -> bool:
        """Whether a cluster goes by the metadata that the router sets."""
        clusters = [part.message for part in self.all(Cluster)]
        return any(reads_metadata(part.message) for part in self.all(OverrideHost)) or any(
            is_destination(one) and not follows_header(one) for one in clusters
        )

    @property
    def replica_routes(self) -> list[Part[RouteAction]]:
        """Routes to those clusters; all routes where the file holds no such cluster."""
        names = {part.message.name for part in self.replica_clusters}
        routes = self.all(RouteAction)
        return [part for part in routes if not names or clusters_of(part.message) & names]

    @property
    def filters(self) -> list[Part[ExternalProcessor]]:
        """The ext_proc filters as they are written, and as routes to the replicas override them."""
        written = self.all(ExternalProcessor)
        said = {
            one.path: one.message
            for entry in self._entries
            for route in self.replica_routes
            for one in self._said_for(route, entry.message)
        }
        overridden = [
            Part(path, _overridden(filter.message, message.overrides))
            for path, message in said.items()
            if isinstance(message, ExtProcPerRoute) and message.overrides
            for filter in written
        ]
        return written + overridden

    def filters_of(self, route: Part[RouteAction]) -> list[Part[ExternalProcessor]]:
        """The ext_proc filters as requests of that route meet them."""
        said = {one.path for entry in self._entries for one in self._said_for(route, entry.message)}
        return [one for one in self.filters if one.path in said] or self.all(ExternalProcessor)

    def is_enabled(self, filter: Part[ExternalProcessor]) -> bool:
        """Whether requests pass that filter: its entry is not disabled, or a route enables it."""
        return all(
            any(not one.message.disabled for _, one in self._settings(entry.message))
            for entry in self._entries
            if entry.message.disabled and entry.path == filter.path[: len(entry.path)]
        )

    def asks(self, route: Part[RouteAction]) -> bool:
        """Whether all requests of that route pass an ext_proc filter."""
        return self._pass(ExternalProcessor, route)

    def holds(self, route: Part[RouteAction]) -> bool:
        """Whether all requests of that route pass a buffer filter, if there is one."""
        return self._pass(Buffer, route)

    def _pass(self, kind: type[Message], route: Part[RouteAction]) -> bool:
        entries = self._entries_of(kind)
        return not entries or any(self._passes(entry.message, route) for entry in entries)

    def _passes(self, filter: HttpFilter, route: Part[RouteAction]) -> bool:
        said = self._said_for(route, filter)
        return not any(one.message.disabled for one in said) if said else not filter.disabled

    def _said_for(self, route: Part[RouteAction], filter: HttpFilter) -> list[Said]:
        """What is said of a filter within a route (of weighted clusters) and nearest around it."""
        within: list[Said] = []
        around: dict[Path, list[Said]] = {}
        for scope, one in self._settings(filter):
            if scope[: len(route.path)] == route.path:
                within.append(one)
            elif route.path[: len(scope)] == scope:
                around.setdefault(scope, []).append(one)
        return within + around.get(max(around, key=len, default=()), [])

    def _settings(self, filter: HttpFilter) -> Iterator[tuple[Path, Said]]:
        """What routes, virtual hosts and the like say of a filter, each with where it holds."""
        said: list[Said] = [
            *self.all(FilterConfig),
            *self.all(ExtProcPerRoute),
            *self.all(BufferPerRoute),
        ]
        for one in said:
            keys = [snake(str(part)) for part in one.path]
            if "typed_per_filter_config" in keys:
                at = keys.index("typed_per_filter_config")
                if one.path[at + 1 : at + 2] == (filter.name,):
                    yield one.path[:at], one

    @property
    def _entries(self) -> list[Part[HttpFilter]]:
        """What the lists of filters hold as ext_proc filters."""
        return self._entries_of(ExternalProcessor)

    def _entries_of(self, kind: type[Message]) -> list[Part[HttpFilter]]:
        return [part for part in self.all(HttpFilter) if self.all(kind, within=part)]

    def ends_before(self, filter: Part[ExternalProcessor]) -> bool:
        """Whether the filter that ends the list, the router, stands before that one."""
        return any(_precedes(part.path, filter.path) is True for part in self.all(Router))

    def is_buffered_after(self, filter: Part[ExternalProcessor]) -> bool:
        """Whether a filter after that one holds a request until all of it is there."""
        return any(_precedes(filter.path, part.path) is not False for part in self.all(Buffer))

    def removes_before(self, filter: Part[ExternalProcessor], header: str) -> bool:
        """Whether a client's header is gone before a request reaches that filter."""
        if any(_removes(part.message.mutations, header) for part in self.all(EarlyHeaderMutation)):
            return True
        return any(
            _precedes(part.path, filter.path) is not False
            for part in self.all(HeaderMutation)
            if part.message.mutations and _removes(part.message.mutations.request_mutations, header)
        )


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


def _overridden(filter: ExternalProcessor, overrides: ExtProcOverrides) -> ExternalProcessor:
    given = {name: getattr(overrides, name) for name in _OVERRIDABLE}
    return replace(
        filter, **{name: value for name, value in given.items() if value not in (None, [])}
    )


def _precedes(first: Path, second: Path) -> bool | None:
    """Whether a filter comes before another; None: they are not in one list, but in patches."""
    *list_of_first, index, _ = first
    *list_of_second, other, _ = second
    if list_of_first == list_of_second and isinstance(index, int) and isinstance(other, int):
        return index < other
    return None


def is_of_envoy_gateway(tree: object) -> bool:
    """Whether it holds a resource of Envoy Gateway's own."""
    documents = tree if isinstance(tree, list) else [tree]
    versions = [str(one.get("apiVersion")) for one in documents if isinstance(one, Mapping)]
    return any(one.startswith("gateway.envoyproxy.io/") for one in versions)

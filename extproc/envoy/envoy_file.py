"""The parts of an Envoy file that matter to a router: filters, routes, clusters."""

from collections.abc import Iterator
from functools import cached_property

from extproc.config import Config
from extproc.envoy.tree import CLUSTER, FILTER, ROUTE, Node, Path, Tree, snake_case
from extproc.proxy.messages import DESTINATION, METADATA_NAMESPACE

_HTTP = "envoy.extensions.filters.http"
BUFFER = f"{_HTTP}.buffer.v3.Buffer"
EXT_PROC = f"{_HTTP}.ext_proc.v3.ExternalProcessor"
OVERRIDE_HOST = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_DYNAMIC = "envoy.config.bootstrap.v3.BootstrapDynamicResources"
_EARLY = "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
_HEADER_MUTATION = f"{_HTTP}.header_mutation.v3.HeaderMutation"
_PER_ROUTE = f"{_HTTP}.ext_proc.v3.ExtProcPerRoute"
_OF_ROUTES = (_PER_ROUTE, "envoy.config.route.v3.FilterConfig", f"{_HTTP}.buffer.v3.BufferPerRoute")
_OVERRIDABLE = (
    "processing_mode",
    "response_attributes",
    "grpc_service",
    "metadata_options",
    "failure_mode_allow",
)


class EnvoyFile(Tree):
    """A bootstrap, a fragment of one, or a patch for a mesh, and the settings of its router.

    Only a file without errors among its ``findings`` is read as Envoy would.
    """

    def __init__(self, tree: object, config: Config | None = None) -> None:
        super().__init__(tree)
        self.config = config or Config()

    def takes(self, kind: str) -> bool:
        """A bootstrap that takes listeners (``lds``) or clusters (``cds``) from elsewhere."""
        names = (f"{kind}_config", f"{kind}_resources_locator")
        return any(name in dynamic for dynamic in self.all(_DYNAMIC) for name in names)

    @cached_property
    def cluster_names(self) -> set[str]:
        """The names of all clusters in the file."""
        return {cluster["name"] for cluster in self.all(CLUSTER)}

    @cached_property
    def router_clusters(self) -> list[Node]:
        """Clusters of ext_proc servers: those that the filters name."""
        names = {router_cluster(filter) for filter in self.filters} - {""}
        return [cluster for cluster in self.all(CLUSTER) if cluster["name"] in names]

    @cached_property
    def replica_clusters(self) -> list[Node]:
        """Clusters that obey the router's choice, by ``override_host`` or as ORIGINAL_DST."""
        return [
            cluster
            for cluster in self.all(CLUSTER)
            if self.all(OVERRIDE_HOST, cluster) or destination(cluster)
        ]

    @cached_property
    def sources(self) -> set[str]:
        """Names what clusters follow: the ``header``, which clients could set, or ``metadata``."""
        of_policies = (source for one in self.all(OVERRIDE_HOST) for source in sources(one))
        return {*of_policies, *map(destination, self.all(CLUSTER))} - {""}

    @cached_property
    def replica_routes(self) -> list[Node]:
        """Routes to those clusters; all routes where the file holds no such cluster."""
        names = {cluster["name"] for cluster in self.replica_clusters}
        routes = self.all(ROUTE)
        return [route for route in routes if not names or clusters_of(route) & names]

    @cached_property
    def filters(self) -> list[Node]:
        """The ext_proc filters as they are written, and as routes to the replicas override them."""
        overridden = [filter for route in self.replica_routes for filter in self.filters_of(route)]
        return [*{one.path: one for one in (*self.all(EXT_PROC), *overridden)}.values()]

    def filters_of(self, route: Node) -> list[Node]:
        """The ext_proc filters as requests of the route meet them."""
        return [
            Node(filter.cls, one.path, filter | _given(one["overrides"]))
            for entry in self._entries(EXT_PROC)
            for one in self._said_for(route, entry)
            if one.kind == _PER_ROUTE and "overrides" in one
            for filter in self.all(EXT_PROC)
        ] or self.all(EXT_PROC)

    def is_enabled(self, filter: Node) -> bool:
        """Tells whether the filter is on: its entry is not disabled, or a route enables it."""
        return all(
            any(not one["disabled"] for _, one in self._settings(entry))
            for entry in self._entries(EXT_PROC)
            if entry["disabled"] and entry.path == filter.path[: len(entry.path)]
        )

    def passes(self, kind: str, route: Node) -> bool:
        """Requests of the route all pass a filter of the type, if there is one."""
        entries = self._entries(kind)
        return not entries or any(self._passes(entry, route) for entry in entries)

    def _passes(self, entry: Node, route: Node) -> bool:
        said = self._said_for(route, entry)
        return not any(one["disabled"] for one in said) if said else not entry["disabled"]

    def _said_for(self, route: Node, entry: Node) -> list[Node]:
        """Settings of a filter within a route (of weighted clusters) and nearest around it."""
        within: list[Node] = []
        around: dict[Path, list[Node]] = {}
        for scope, one in self._settings(entry):
            if scope[: len(route.path)] == route.path:
                within.append(one)
            elif route.path[: len(scope)] == scope:
                around.setdefault(scope, []).append(one)
        return within + around.get(max(around, key=len, default=()), [])

    def _settings(self, entry: Node) -> Iterator[tuple[Path, Node]]:
        """Settings of a filter in routes, virtual hosts and the like, each with its scope."""
        for one in (node for kind in _OF_ROUTES for node in self.all(kind)):
            keys = [snake_case(str(part)) for part in one.path]
            if "typed_per_filter_config" in keys:
                at = keys.index("typed_per_filter_config")
                if one.path[at + 1 : at + 2] == (entry["name"],):
                    yield one.path[:at], one

    def _entries(self, kind: str) -> list[Node]:
        return [entry for entry in self.all(FILTER) if self.all(kind, entry)]

    def is_buffered_after(self, filter: Node) -> bool:
        """A filter after that one holds a request until all of it is there."""
        return any(_may_precede(filter.path, one.path) for one in self.all(BUFFER))

    def removes_before(self, filter: Node, header: str) -> bool:
        """A client's header is gone before a request reaches that filter."""
        return any(_removes(early["mutations"], header) for early in self.all(_EARLY)) or any(
            _removes(one["mutations"]["request_mutations"], header)
            for one in self.all(_HEADER_MUTATION)
            if _may_precede(one.path, filter.path)
        )


def destination(cluster: Node) -> str:
    """Source of the address that an ORIGINAL_DST cluster goes to: a ``header``, of clients as well,
    the router's ``metadata``, or nothing."""
    config = cluster["original_dst_lb_config"]
    if config["use_http_header"]:
        return "header"
    key = config["metadata_key"]
    chosen = key["key"] == METADATA_NAMESPACE and [one["key"] for one in key["path"]]
    return "metadata" if chosen == [DESTINATION] else ""


def sources(policy: Node) -> set[str]:
    """Sources of the router's choice for an override_host policy: ``header``, ``metadata``."""
    listed = policy["override_host_sources"]
    header = {"header" for one in listed if one["header"].lower() == DESTINATION}
    return header | {"metadata" for one in listed if one["metadata"]["key"] == METADATA_NAMESPACE}


def router_cluster(filter: Node) -> str:
    """Name of the cluster of ext_proc servers; empty where the filter names none."""
    return str(filter["grpc_service"]["envoy_grpc"]["cluster_name"])


def clusters_of(route: Node) -> set[str]:
    """Names of the clusters a route leads to; none where a header or a plugin says."""
    weighted = route["weighted_clusters"]["clusters"]
    return {name for name in (route["cluster"], *(one["name"] for one in weighted)) if name}


def _removes(mutations: list[Node], header: str) -> bool:
    return any((one["remove"] or "").lower() == header for one in mutations)


def _given(overrides: Node) -> dict[str, object]:
    return {name: overrides[name] for name in _OVERRIDABLE if overrides.get(name) not in (None, [])}


def _may_precede(first: Path, second: Path) -> bool:
    """The first of two filters comes before the second, or patches put them into a list."""
    return first[:-2] != second[:-2] or first < second

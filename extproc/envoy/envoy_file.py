"""Filters, routes and clusters of an Envoy file that concern a router."""

from collections.abc import Iterator
from functools import cached_property

from extproc.config import Config
from extproc.envoy.tree import (
    BOOTSTRAP,
    CLUSTER,
    FILTER,
    MANAGER,
    ROUTE,
    Node,
    Path,
    Tree,
    snake_case,
)
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
    """Bootstrap, fragment of a bootstrap, or patch for a mesh; ``config``: the router's settings.

    If ``findings`` has no error, the methods interpret the file as Envoy does.
    """

    def __init__(self, tree: object, config: Config | None = None) -> None:
        super().__init__(tree)
        self.config = config or Config()

    def takes(self, kind: str) -> bool:
        """Return true if listeners (``lds``) or clusters (``cds``) come from elsewhere."""
        names = (f"{kind}_config", f"{kind}_resources_locator")
        return any(name in dynamic for dynamic in self.all(_DYNAMIC) for name in names)

    @cached_property
    def lists_all_clusters(self) -> bool:
        """True if the file is a bootstrap that has every cluster of Envoy."""
        return bool(self.all(BOOTSTRAP)) and not self.takes("cds")

    @cached_property
    def cluster_names(self) -> set[str]:
        return {cluster["name"] for cluster in self.all(CLUSTER)}

    @cached_property
    def managers(self) -> list[Node]:
        """Connection managers with one of ``ext_procs``; all if none has one, as in patches."""
        managers = self.all(MANAGER)
        return [manager for manager in managers if self.ext_procs_in(manager)] or managers

    @cached_property
    def router_clusters(self) -> list[Node]:
        """Clusters that the ext_proc filters name."""
        names = {router_cluster(filter) for filter in self.filters} - {""}
        return [cluster for cluster in self.all(CLUSTER) if cluster["name"] in names]

    @cached_property
    def replica_clusters(self) -> list[Node]:
        """Clusters that follow the router's choice, by ``override_host`` or as ORIGINAL_DST."""
        return [
            cluster
            for cluster in self.all(CLUSTER)
            if self.all(OVERRIDE_HOST, cluster) or destination(cluster)
        ]

    @cached_property
    def sources(self) -> set[str]:
        """Sources of the router's choice: ``header``, which clients could set, ``metadata``."""
        of_policies = (name for policy in self.all(OVERRIDE_HOST) for name in sources(policy))
        return {*of_policies, *map(destination, self.all(CLUSTER))} - {""}

    @cached_property
    def replica_routes(self) -> list[Node]:
        """Routes to ``replica_clusters``; all routes if the file has no such cluster."""
        names = {cluster["name"] for cluster in self.replica_clusters}
        return [route for route in self.all(ROUTE) if not names or clusters_of(route) & names]

    @cached_property
    def ext_procs(self) -> list[Node]:
        """The ext_proc filters that are enabled for a route to the replicas; others ask another
        server. All filters if none is enabled there, as in patches."""
        entries = [entry for route in self.replica_routes for entry in self._ext_procs_for(route)]
        enabled = {filter.path: filter for at in entries for filter in self.all(EXT_PROC, at)}
        return [*enabled.values()] or self.all(EXT_PROC)

    def ext_procs_in(self, node: Node) -> list[Node]:
        """Return those of ``ext_procs`` that a listener or a connection manager contains."""
        depth = len(node.path)
        return [filter for filter in self.ext_procs if filter.path[:depth] == node.path]

    @cached_property
    def filters(self) -> list[Node]:
        """The ext_proc filters, as configured and as overridden by routes to the replicas."""
        overridden = [filter for route in self.replica_routes for filter in self.filters_of(route)]
        return [*{node.path: node for node in (*self.ext_procs, *overridden)}.values()]

    def filters_of(self, route: Node) -> list[Node]:
        """Return the ext_proc filters that are enabled for a route, with the route's overrides."""
        return [
            node
            for entry in self._ext_procs_for(route)
            for filter in self.all(EXT_PROC, entry)
            for node in _overridden(filter, self._settings_for(route, entry)) or [filter]
        ]

    def _ext_procs_for(self, route: Node) -> list[Node]:
        """Return the entries of ext_proc filters that are enabled for a route, and not part of
        another connection manager."""
        manager = self.around(route, MANAGER)
        return [
            entry
            for entry in self._entries(EXT_PROC)
            if self._passes(entry, route)
            if None in (manager, around := self.around(entry, MANAGER)) or manager is around
        ]

    def is_enabled(self, filter: Node) -> bool:
        """Return true if the entry in ``http_filters`` is not disabled, or a route enables it."""
        return all(
            any(not setting["disabled"] for _, setting in self._settings(entry))
            for entry in self._entries(EXT_PROC)
            if entry["disabled"] and entry.path == filter.path[: len(entry.path)]
        )

    def passes(self, kind: str, route: Node) -> bool:
        """Return true if the route enables a filter of this type, or the file has none."""
        entries = self._entries(kind)
        return not entries or any(self._passes(entry, route) for entry in entries)

    def _passes(self, entry: Node, route: Node) -> bool:
        settings = self._settings_for(route, entry) or [entry]
        return not any(setting["disabled"] for setting in settings)

    def _settings_for(self, route: Node, entry: Node) -> list[Node]:
        """Return the settings of a filter that apply to a route: those in the route and its
        weighted clusters, and those of the innermost scope around it, such as a virtual host."""
        within: list[Node] = []
        around: dict[Path, list[Node]] = {}
        for scope, setting in self._settings(entry):
            if scope[: len(route.path)] == route.path:
                within.append(setting)
            elif route.path[: len(scope)] == scope:
                around.setdefault(scope, []).append(setting)
        return within + around.get(max(around, key=len, default=()), [])

    def _settings(self, entry: Node) -> Iterator[tuple[Path, Node]]:
        """Yield the scope (a route or a virtual host) and value of each setting of a filter."""
        for setting in (node for kind in _OF_ROUTES for node in self.all(kind)):
            keys = [snake_case(str(part)) for part in setting.path]
            if "typed_per_filter_config" in keys:
                at = keys.index("typed_per_filter_config")
                if setting.path[at + 1 : at + 2] == (entry["name"],):
                    yield setting.path[:at], setting

    def _entries(self, kind: str) -> list[Node]:
        return [entry for entry in self.all(FILTER) if self.all(kind, entry)]

    def around(self, node: Node, kind: str) -> Node | None:
        """Return the message of a type that contains ``node``; None if the file shows none."""
        found = (each for each in self.all(kind) if node.path[: len(each.path)] == each.path)
        return next(found, None)

    def is_buffered_after(self, filter: Node) -> bool:
        """Return true if a buffer filter after ``filter`` holds requests until they are whole."""
        buffers = self.all(BUFFER, self.around(filter, MANAGER))
        return any(_may_precede(filter.path, buffer.path) for buffer in buffers)

    def removes_before(self, filter: Node, header: str) -> bool:
        """Return true if a client's header is removed before a request reaches ``filter``."""
        manager = self.around(filter, MANAGER)
        removed = [early["mutations"] for early in self.all(_EARLY, manager)] + [
            mutation["mutations"]["request_mutations"]
            for mutation in self.all(_HEADER_MUTATION, manager)
            if _may_precede(mutation.path, filter.path)
        ]
        return any(
            (mutation["remove"] or "").lower() == header
            for mutations in removed
            for mutation in mutations
        )


def destination(cluster: Node) -> str:
    """Return the source from which an ORIGINAL_DST cluster reads the address.

    The source is ``header``, which any client can set; ``metadata``, which only the router can set;
    or an empty string for anything else.
    """
    config = cluster["original_dst_lb_config"]
    if config["use_http_header"]:
        return "header"
    key = config["metadata_key"]
    path = [key["key"], *(part["key"] for part in key["path"])]
    return "metadata" if path == [METADATA_NAMESPACE, DESTINATION] else ""


def sources(policy: Node) -> set[str]:
    """Return from where (``header``, ``metadata``) an override_host policy reads the choice."""
    listed = policy["override_host_sources"]
    reads = {
        "header": any(source["header"].lower() == DESTINATION for source in listed),
        "metadata": any(source["metadata"]["key"] == METADATA_NAMESPACE for source in listed),
    }
    return {name for name, does in reads.items() if does}


def router_cluster(filter: Node) -> str:
    """Return the router's cluster that an ext_proc filter names; empty if the filter names none."""
    return str(filter["grpc_service"]["envoy_grpc"]["cluster_name"])


def clusters_of(route: Node) -> set[str]:
    """Return the clusters that a route names; empty if a header or a plugin chooses the cluster."""
    weighted = route["weighted_clusters"]["clusters"]
    return {route["cluster"], *(cluster["name"] for cluster in weighted)} - {"", None}


def _overridden(filter: Node, settings: list[Node]) -> list[Node]:
    """Return the filter once for each setting that overrides it, with the fields of the setting."""
    return [
        Node(filter.cls, setting.path, filter | _overrides(setting["overrides"]))
        for setting in settings
        if "overrides" in setting
    ]


def _overrides(overrides: Node) -> dict[str, object]:
    return {name: overrides[name] for name in _OVERRIDABLE if overrides.get(name) not in (None, [])}


def _may_precede(first: Path, second: Path) -> bool:
    """Return true if the first filter precedes the second, or may do so in a patched list."""
    return first[:-2] != second[:-2] or first < second

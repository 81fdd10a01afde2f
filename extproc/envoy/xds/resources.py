"""Listeners, routes and clusters of an Envoy file, as LDS, RDS and CDS serve them.

The file is what an Envoy would run by itself (``envoy/envoy.yaml``). But routes become resources of
their own, and clusters that have all replicas as members (``override_host``, subsets) take these
from EDS.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from betterproto2 import Message
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost

from extproc.envoy.choice import is_subset
from extproc.envoy.file import Parts, snake
from extproc.envoy.file import Path as Place
from extproc.envoy.finding import Finding, Level
from extproc.envoy.xds.catalog import CLUSTERS, LISTENERS, ROUTES
from extproc.ground.files import Watched
from extproc.ground.yaml_file import read_yaml

Resources = Mapping[str, Mapping[str, bytes]]
"""By type and name."""

_FROM_ADS = {"ads": {}, "resource_api_version": "V3"}
_OF_OTHER_DISCOVERY = ("load_assignment", "dns_lookup_family")


def watched(path: Path, pool: str) -> Watched[Resources]:
    """The resources of a file, read again when it changes; errors name the file."""

    def read() -> Resources:
        try:
            return resources(read_yaml(path), pool)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise ValueError(f"{path} (xds.envoy_file): {reason}") from None
        except ValueError as error:
            raise ValueError(f"{path} (xds.envoy_file): {error}") from None

    return Watched("envoy file", read, path)


def resources(tree: object, pool: str) -> Resources:
    """The resources of a bootstrap, whose clusters have this pool's replicas; a cluster that
    already is of type EDS says itself.

    Raises:
        ValueError: it is none, or not valid.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get("static_resources"), Mapping):
        raise ValueError("it is no bootstrap: it has no static_resources")
    file = Parts(tree)
    _refuse([one for one in file.findings if one.level is Level.ERROR])
    served: dict[str, Any] = copy.deepcopy(dict(tree))
    for cluster in file.all(Cluster):
        if file.all(OverrideHost, within=cluster) or is_subset(cluster.message):
            _take_from_eds(_at(served, cluster.path), pool)
    managers = [_at(served, part.path) for part in file.all(HttpConnectionManager)]
    routes = [taken for one in managers if (taken := _take_routes(one)) is not None]
    static = served["static_resources"]
    return {
        CLUSTERS: _encoded(Cluster, static.get("clusters") or []),
        LISTENERS: _encoded(Listener, static.get("listeners") or []),
        ROUTES: _encoded(RouteConfiguration, routes),
    }


def _at(tree: Any, place: Place) -> Any:
    for part in place:
        tree = tree[part]
    return tree


def _take_from_eds(cluster: dict[str, Any], pool: str) -> None:
    eds = _pop(cluster, "eds_cluster_config") or {}
    service = eds.get("service_name") or eds.get("serviceName") or pool
    for key in ("type", *_OF_OTHER_DISCOVERY):
        _pop(cluster, key)
    cluster["type"] = "EDS"
    cluster["eds_cluster_config"] = {"service_name": service, "eds_config": _FROM_ADS}


def _take_routes(manager: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the routes out of a connection manager and has it ask for them."""
    routes: dict[str, Any] | None = _pop(manager, "route_config")
    if routes is not None:
        if not routes.get("name"):
            raise ValueError("a route_config has no name, by which RDS would serve it")
        manager["rds"] = {"route_config_name": routes["name"], "config_source": _FROM_ADS}
    return routes


def _pop(fields: dict[str, Any], name: str) -> Any:
    """A field's value, under its ``snake_case`` or its ``camelCase`` name."""
    found = [key for key in fields if snake(key) == name]
    return fields.pop(found[0]) if found else None


def _encoded(cls: type[Message], trees: list[dict[str, Any]]) -> dict[str, bytes]:
    encoded: dict[str, bytes] = {}
    file = Parts(trees, cls)
    _refuse(file.findings)
    for part in file.all(cls):
        message: Any = part.message
        if not message.name:
            raise ValueError(f"a {cls.__name__} has no name")
        if encoded.setdefault(message.name, bytes(message)) != bytes(message):
            raise ValueError(f"there are two different {cls.__name__}s called {message.name!r}")
    return encoded


def _refuse(findings: list[Finding]) -> None:
    for one in findings:
        raise ValueError(f"{one.where}: {one.text}")

"""Listeners, routes and clusters of an Envoy file, as LDS, RDS and CDS serve them.

The file is what an Envoy would run by itself (``envoy/envoy.yaml``). But routes become resources of
their own, and clusters that have all replicas as members (``override_host``, subsets) take these
from EDS.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
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

from extproc.check.envoy_file import EnvoyFile
from extproc.check.finding import Level
from extproc.check.schema import problems
from extproc.check.tree import Path as Place
from extproc.check.tree import snake
from extproc.check.typed import typed
from extproc.check.ways import is_subset
from extproc.xds.catalog import CLUSTERS, LISTENERS, ROUTES
from extproc.yaml_file import read_yaml

logger = logging.getLogger(__name__)

Resources = Mapping[str, Mapping[str, bytes]]
"""By type and name."""

_FROM_ADS = {"ads": {}, "resource_api_version": "V3"}
_OF_OTHER_DISCOVERY = ("load_assignment", "dns_lookup_family")


class WatchedEnvoyFile:
    """An Envoy file that is read again when it changes; a broken one changes nothing."""

    def __init__(self, path: Path, pool: str) -> None:
        self._path = path
        self._pool = pool
        self._read: tuple[int, int] | None = None
        self._problem = ""

    def read(self) -> Resources:
        """What is in it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no Envoy file; the message names it and says what is wrong.
        """
        stamp = self._stamp()
        try:
            return resources(read_yaml(self._path), self._pool)
        except ValueError as error:
            raise ValueError(f"{self._path} (xds.envoy_file): {error}") from None
        except OSError:
            stamp = None  # it may be readable the next time, without any change
            raise
        finally:
            self._read = stamp

    def news(self) -> Resources | None:
        """What is in it, if it changed and can be used; what cannot be is logged once."""
        try:
            if self._stamp() == self._read:
                return None
            read = self.read()
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                logger.error("envoy file is not usable", extra={"error": str(error)})
            self._problem = str(error)
            return None
        self._problem = ""
        logger.info("envoy file is read again", extra={"file": str(self._path)})
        return read

    def _stamp(self) -> tuple[int, int] | None:
        """Differs when the file was written to.

        Raises:
            OSError: it is not there.
        """
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size


def resources(tree: object, pool: str) -> Resources:
    """The resources of a bootstrap.

    Args:
        tree: the bootstrap as YAML.
        pool: whose replicas its clusters have; a cluster that already is of type EDS says itself.

    Raises:
        ValueError: it is none, or not valid.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get("static_resources"), Mapping):
        raise ValueError("it is no bootstrap: it has no static_resources")
    file = EnvoyFile(tree)
    found = [one for node in file.nodes if not node.inside for one in problems(node)]
    if errors := [one for one in found if one.level is Level.ERROR]:
        raise ValueError(f"{errors[0].where}: {errors[0].text}")
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


def _encoded(cls: type[Message], trees: Iterable[dict[str, Any]]) -> dict[str, bytes]:
    encoded: dict[str, bytes] = {}
    for tree in trees:
        name, value = tree.get("name"), bytes(typed(cls, tree))
        if not name:
            raise ValueError(f"a {cls.__name__} has no name")
        if encoded.setdefault(name, value) != value:
            raise ValueError(f"there are two different {cls.__name__}s called {name!r}")
    return encoded

"""What an Envoy runs with, wherever it has that from, out of its ``/config_dump``."""

from collections.abc import Iterator
from typing import Any

_CLUSTERS = ("ClustersConfigDump", "static_clusters", "dynamic_active_clusters")
_LISTENERS = ("ListenersConfigDump", "static_listeners", "dynamic_listeners")
_ROUTES = ("RoutesConfigDump", "dynamic_route_configs")
"""Those that are static stand in their listeners."""


def running(dump: dict[str, Any]) -> dict[str, Any]:
    """As a file that says all of it would.

    Raises:
        LookupError, TypeError, AttributeError: it is no such dump.
    """
    (told,) = _parts(dump, "BootstrapConfigDump")
    bootstrap = {key: value for key, value in told["bootstrap"].items() if "dynamic" not in key}
    bootstrap["static_resources"] = {
        "clusters": [_untyped(one["cluster"]) for one in _entries(dump, *_CLUSTERS)],
        "listeners": [
            _untyped(one.get("active_state", one)["listener"])
            for one in _entries(dump, *_LISTENERS)
            if "listener" in one or "active_state" in one
        ],
    }
    routes = [one["route_config"] for one in _entries(dump, *_ROUTES) if "route_config" in one]
    return {"bootstrap": bootstrap, "routes": routes}


def refused(dump: dict[str, Any]) -> Iterator[str]:
    """Why Envoy did not take what its control plane told last, of each such thing."""
    for lists in (_LISTENERS, _CLUSTERS, _ROUTES):
        for one in _entries(dump, *lists):
            if "error_state" in one:
                yield str(one["error_state"].get("details", "for no reason that it tells"))


def _entries(dump: dict[str, Any], part: str, *lists: str) -> Iterator[dict[str, Any]]:
    for told in _parts(dump, part):
        for name in lists:
            yield from told.get(name, ())


def _parts(dump: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in dump["configs"] if one["@type"].endswith(f".{name}")]


def _untyped(resource: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resource.items() if key != "@type"}

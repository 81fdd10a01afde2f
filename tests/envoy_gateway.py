"""The Envoy configuration that Envoy Gateway makes of our resources for it.

``data/gateways/envoy_gateway.yaml`` holds what its translator (release 1.9) writes, with
``$how path`` in place of what it takes from a field of a resource (API v1alpha1). Fields that it
names nowhere are refused. Members and routes are in the configuration, not from xDS.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from extproc.lab.harness.envoy_config import endpoints, socket_address

TRANSLATED = Path(__file__).parent / "data" / "gateways" / "envoy_gateway.yaml"


def bootstrap(
    resources: Sequence[Mapping[str, Any]],
    listen: str,
    admin: str,
    replicas: Sequence[str],
    routers: Sequence[str],
) -> dict[str, Any]:
    """The whole configuration of an Envoy; addresses are ``ip:port``.

    Raises:
        ValueError: a resource has a field that is not known here.
        KeyError: a resource, or a field that is needed, is missing.
    """
    names, translated = yaml.safe_load_all(TRANSLATED.read_text(encoding="utf-8"))
    fields = {path: value for one in resources for path, value in _fields(one["spec"], one["kind"])}
    used = dict(_fields(names))
    for path, value in used.items():
        assert fields[path] == value
    resources_of_envoy = _filled(translated, fields, used)
    if unknown := fields.keys() - used.keys():
        raise ValueError(f"Envoy Gateway has no field {', '.join(sorted(unknown))}")
    (listener,), clusters = resources_of_envoy.values()
    listener["address"] = socket_address(listen)
    for cluster, members in zip(clusters, (replicas, routers), strict=True):
        cluster["load_assignment"]["endpoints"] = endpoints(members)
    return {"admin": {"address": socket_address(admin)}, "static_resources": resources_of_envoy}


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its path from the kind on, as ``BackendTrafficPolicy.retry.numRetries``."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _fields(inner, f"{path}.{name}".lstrip("."))
    elif path == "EnvoyExtensionPolicy.extProc":
        (only,) = value
        yield from _fields(only, path)
    else:
        yield path, value


def _filled(value: Any, fields: Mapping[str, Any], used: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, fields, used) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, fields, used) for inner in value]
    if isinstance(value, str) and value.startswith("$"):
        how, path = value[1:].split()
        used[path] = fields[path]
        return _HOW[how](fields[path])
    return value


def _duration(said: str) -> str:
    """As protobuf writes one; the API has hours and milliseconds too, but no fractions."""
    for unit, factor in (("ms", 0.001), ("h", 3600), ("s", 1)):
        if said.endswith(unit):
            return f"{int(said.removesuffix(unit)) * factor:g}s"
    raise ValueError(f"no duration of Gateway API: {said!r}")


_HOW: dict[str, Callable[[Any], Any]] = {
    "same": lambda said: said,
    "duration": _duration,
    "seconds": lambda said: int(_duration(said).removesuffix("s")),
    "bytes": lambda said: int(said.removesuffix("Mi")) * 2**20,
    "joined": ",".join,
    "removals": lambda said: [{"remove": name} for name in said],
    "body_mode": {"Buffered": "BUFFERED"}.__getitem__,
}

"""Translates our Envoy Gateway resources to Envoy's configuration, as Envoy Gateway 1.9 does.

``data/gateways/envoy_gateway.yaml`` is the output of Envoy Gateway's translator, with ``$how path``
for each value that comes from a field of a resource (API v1alpha1). A resource with another field
is refused. Endpoints and routes are in the configuration, not from xDS.
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
    """Returns a whole Envoy configuration; addresses are ``ip:port``.

    Raises:
        ValueError: a resource has an unknown field.
        KeyError: a resource or a required field is missing.
    """
    names, translated = yaml.safe_load_all(TRANSLATED.read_text(encoding="utf-8"))
    fields = {
        path: value
        for resource in resources
        for path, value in _fields(resource["spec"], resource["kind"])
    }
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
    """Yields each field with its path, such as ``BackendTrafficPolicy.retry.numRetries``."""
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


def _duration(value: str) -> str:
    """Converts a duration of the Gateway API (``ms``, ``s`` or ``h``) to protobuf's form."""
    for unit, factor in (("ms", 0.001), ("h", 3600), ("s", 1)):
        if value.endswith(unit):
            return f"{int(value.removesuffix(unit)) * factor:g}s"
    raise ValueError(f"no duration of Gateway API: {value!r}")


_HOW: dict[str, Callable[[Any], Any]] = {
    "same": lambda value: value,
    "duration": _duration,
    "seconds": lambda value: int(_duration(value).removesuffix("s")),
    "bytes": lambda value: int(value.removesuffix("Mi")) * 2**20,
    "joined": ",".join,
    "removals": lambda value: [{"remove": name} for name in value],
    "body_mode": {"Buffered": "BUFFERED"}.__getitem__,
}

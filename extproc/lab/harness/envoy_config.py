"""Envoy's configuration, made from ``envoy/envoy.yaml``, and a reader of its access log."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from extproc.ground.address import split_address

TEMPLATE = Path(__file__).with_name("envoy.yaml")  # in a clone a link to `envoy/envoy.yaml`

Bootstrap = dict[str, Any]  # Envoy's configuration as a YAML tree

_ROUTING_FILTERS = ("local_ratelimit", "set_filter_state", "ext_proc", "buffer")


def addressed(
    *,
    listen: str,
    admin: str,
    routers: Iterable[str],
    replicas: Iterable[str],
    template: Path = TEMPLATE,
) -> Bootstrap:
    """Return the template's configuration with these addresses, each ``host:port``."""
    bootstrap: Bootstrap = yaml.safe_load(template.read_text(encoding="utf-8"))
    resources = bootstrap["static_resources"]
    (listener,) = resources["listeners"]
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    bootstrap["admin"]["address"] = socket_address(admin)
    listener["address"] = socket_address(listen)
    clusters["router"]["load_assignment"]["endpoints"] = endpoints(routers)
    clusters["replicas"]["load_assignment"]["endpoints"] = endpoints(replicas)
    return bootstrap


def managers(bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Return the HTTP connection manager of each listener."""
    return [
        chain["filters"][0]["typed_config"]
        for listener in bootstrap["static_resources"].get("listeners", ())
        for chain in listener["filter_chains"]
    ]


def manager_of(bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the HTTP connection manager of the only listener."""
    (manager,) = managers(bootstrap)
    return manager


def drop_ext_proc(bootstrap: Bootstrap) -> None:
    """Remove ext_proc and the filters that depend on its answer."""
    filters = manager_of(bootstrap)["http_filters"]
    filters[:] = [
        entry for entry in filters if entry["name"].rpartition(".")[2] not in _ROUTING_FILTERS
    ]


def socket_address(address: str) -> dict[str, Any]:
    """Return ``host:port`` in the form of Envoy's configuration."""
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def endpoints(addresses: Iterable[str]) -> list[dict[str, Any]]:
    """Return the ``endpoints`` of a cluster's ``load_assignment`` for these addresses."""
    members = [{"endpoint": {"address": socket_address(address)}} for address in addresses]
    return [{"lb_endpoints": members}]


# Microseconds for which ext_proc held the headers, and the body ("Access Log Fields" in Envoy's
# documentation). The first field is missing if the router gets both in one message.
_ADDED = ("request_header_latency_us", "request_body_total_latency_us")

_FORMAT = {
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "status": "%RESPONSE_CODE%",
    "upstream": "%UPSTREAM_HOST%",
    "destination": "%REQ(X-GATEWAY-DESTINATION-ENDPOINT)%",
    "flags": "%RESPONSE_FLAGS%",
    "duration_ms": "%DURATION%",
} | {name: f"%FILTER_STATE(envoy.filters.http.ext_proc:FIELD:{name})%" for name in _ADDED}


@dataclass(frozen=True, slots=True)
class Access:
    """Access log entry, which Envoy writes when a request ends."""

    request_id: str
    status: int  # 0: the client left before the response
    upstream: str  # `ip:port` of the replica that served the request; empty: no replica
    duration_s: float
    added_ms: float | None  # wait for the router; None: the router did not answer
    destination: str = ""  # the router's choices, best first; empty: no decision
    flags: str = ""  # Envoy's response flags: why a request failed


def add_access_log(bootstrap: Bootstrap, path: Path) -> None:
    """Make Envoy write its access log to ``path``."""
    kind = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
    config = {"@type": kind, "path": str(path), "log_format": {"json_format": _FORMAT}}
    for manager in managers(bootstrap):
        manager["access_log"] = [{"name": "envoy.access_loggers.file", "typed_config": config}]


class AccessLog:
    """Reader of an access log that Envoy is writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Access]:
        """Read the POST requests that were logged since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                written = file.read()
        except FileNotFoundError:
            return []
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = map(json.loads, whole.splitlines())
        return [_access(record) for record in records if record["method"] == "POST"]


def _access(record: dict[str, Any]) -> Access:
    waits = (record[name] for name in _ADDED)
    headers, body = (None if wait in (None, "-") else float(wait) for wait in waits)
    return Access(
        request_id=record["request_id"] or "",
        status=int(record["status"]),
        upstream=record["upstream"] or "",
        duration_s=record["duration_ms"] / 1000,
        added_ms=None if body is None else ((headers or 0.0) + body) / 1000,
        destination=record["destination"] or "",
        flags=record["flags"] or "",
    )

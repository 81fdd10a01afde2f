"""``envoy/envoy.yaml`` with other addresses, so that demo and tests run what users run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from extproc.address import split_address

TEMPLATE = Path(__file__).with_name("envoy.yaml")
"""In a clone a link to ``envoy/envoy.yaml``; an installed package has the file itself."""


def render(
    *,
    listen_port: int,
    admin_port: int,
    router_ports: Sequence[int],
    replica_addresses: Sequence[str],
    template: Path = TEMPLATE,
) -> str:
    """The template as YAML, on loopback: its ports, routers (one port each) and replicas
    (``host:port``) replaced, all else kept."""
    bootstrap = yaml.safe_load(template.read_text(encoding="utf-8"))
    resources = bootstrap["static_resources"]
    (listener,) = resources["listeners"]
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    bootstrap["admin"]["address"] = socket_address("127.0.0.1", admin_port)
    listener["address"] = socket_address("127.0.0.1", listen_port)
    _set_members(clusters["router"], [("127.0.0.1", port) for port in router_ports])
    _set_members(clusters["replicas"], [split_address(one) for one in replica_addresses])
    return yaml.safe_dump(bootstrap, sort_keys=False)


def socket_address(host: str, port: int) -> dict[str, Any]:
    """As Envoy files write it."""
    return {"socket_address": {"address": host, "port_value": port}}


def _set_members(cluster: dict[str, Any], members: Sequence[tuple[str, int]]) -> None:
    endpoints = [{"endpoint": {"address": socket_address(host, port)}} for host, port in members]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]

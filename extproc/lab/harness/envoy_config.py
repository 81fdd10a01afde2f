"""``envoy/envoy.yaml`` with other addresses, so that demo and tests run what users run.

Envoy's configuration is the tree that YAML makes of it; whoever starts an Envoy writes it out.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from extproc.ground.address import split_address

TEMPLATE = Path(__file__).with_name("envoy.yaml")
"""In a clone a link to ``envoy/envoy.yaml``; an installed package has the file itself."""

Bootstrap = dict[str, Any]
"""All of Envoy's configuration."""


def addressed(
    *,
    listen: str,
    admin: str,
    routers: Iterable[str],
    replicas: Iterable[str],
    template: Path = TEMPLATE,
) -> Bootstrap:
    """The template with these addresses, ``host:port``, in place of its own."""
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
    """What each of its listeners does with HTTP."""
    return [
        chain["filters"][0]["typed_config"]
        for listener in bootstrap["static_resources"].get("listeners", ())
        for chain in listener["filter_chains"]
    ]


def manager_of(bootstrap: Bootstrap) -> dict[str, Any]:
    """What its only listener does with HTTP."""
    (manager,) = managers(bootstrap)
    return manager


def socket_address(address: str) -> dict[str, Any]:
    """``host:port`` as Envoy files write it."""
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def endpoints(addresses: Iterable[str]) -> list[dict[str, Any]]:
    """Those of a cluster with these members, in its ``load_assignment``."""
    members = [{"endpoint": {"address": socket_address(one)}} for one in addresses]
    return [{"lb_endpoints": members}]

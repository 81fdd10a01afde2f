"""Envoy files: equal to their templates, used by the demo, and valid for Envoy Gateway.

``python -m tests.envoy.test_templates`` writes the files again.
"""

import copy
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import TEMPLATE, addressed
from tests.envoy_gateway import bootstrap

ENVOY = Path(__file__).parents[2] / "envoy"
CHART = ENVOY.parent / "docs" / "helm" / "files" / "envoy.yaml"
TEMPLATES = Environment(
    loader=FileSystemLoader(ENVOY / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
FILES = [name.removesuffix(".j2") for name in TEMPLATES.list_templates() if name != "base.yaml.j2"]
GATEWAY = list(yaml.safe_load_all((ENVOY / "envoy_gateway.yaml").read_text(encoding="utf-8")))


def at(block: str, column: int) -> str:
    """Indent a block that begins at this column of a line."""
    return indent(dedent(block).strip("\n"), " " * column)[column:]


TEMPLATES.filters["at"] = at


def made(name: str) -> str:
    return TEMPLATES.get_template(f"{name}.j2").render()


def destination(name: str) -> Path:
    return CHART if name == "chart.yaml" else ENVOY / name


@pytest.mark.parametrize("name", FILES)
def test_file_equals_its_template(name: str) -> None:
    text = destination(name).read_text(encoding="utf-8")
    assert text == made(name), f"change envoy/templates/{name}.j2, then run: make envoy-files"


def test_demo_runs_shipped_file() -> None:
    assert TEMPLATE.read_text(encoding="utf-8") == (ENVOY / "envoy.yaml").read_text("utf-8")


def test_demo_changes_only_addresses() -> None:
    listen, admin = "127.0.0.1:1", "127.0.0.1:2"
    routers, replicas = ["127.0.0.1:3", "127.0.0.1:4"], ["10.0.0.1:5", "h:6"]
    rendered = addressed(listen=listen, admin=admin, routers=routers, replicas=replicas)
    original = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    for tree in (original, rendered):
        resources = tree["static_resources"]
        groups = [cluster["load_assignment"].pop("endpoints") for cluster in resources["clusters"]]
        addresses = [
            [tree["admin"].pop("address")],
            [resources["listeners"][0].pop("address")],
            *(
                [endpoint["endpoint"]["address"] for endpoint in group["lb_endpoints"]]
                for [group] in groups
            ),
        ]
    assert rendered == original
    found = [
        [f"{at['address']}:{at['port_value']}" for address in part for at in address.values()]
        for part in addresses
    ]
    assert found == [[admin], [listen], routers, replicas]
    assert {key for part in addresses for address in part for key in address} == {"socket_address"}


def translated(resources: list[Any]) -> dict[str, Any]:
    return bootstrap(
        resources, "0.0.0.0:10080", "127.0.0.1:19000", ["10.0.0.1:8000"], ["10.0.0.2:50051"]
    )


def test_envoy_gateway_file_lacks_only_max_message_timeout() -> None:
    """Envoy Gateway has no field for it; without it, requests do not wait at the router."""
    findings = check_envoy(translated(GATEWAY))
    lacking = [
        (finding.rule, finding.level) for finding in findings if finding.level is not Level.OK
    ]
    assert lacking == [("requests_can_queue", Level.WARNING)]


def test_misspelt_field_of_envoy_gateway_is_refused() -> None:
    resources = copy.deepcopy(GATEWAY)
    resources[3]["spec"]["extProc"][0]["failOpened"] = True
    with pytest.raises(ValueError, match=r"no field EnvoyExtensionPolicy\.extProc\.failOpened"):
        translated(resources)


if __name__ == "__main__":
    for _name in FILES:
        destination(_name).write_text(made(_name), encoding="utf-8")

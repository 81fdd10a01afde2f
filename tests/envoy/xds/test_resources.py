"""The resources that an Envoy file becomes; test_envoy.py gives them to a real Envoy."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration

from extproc.config import Config
from extproc.envoy.xds.catalog import CLUSTERS, LISTENERS, ROUTES
from extproc.envoy.xds.resources import resources, watched
from extproc.ground.yaml_file import read_yaml
from tests.conftest import Logged, too_many_open_files

ENVOY = Path(__file__).parents[3] / "envoy"
GOOD: dict[str, Any] = yaml.safe_load((ENVOY / "envoy.yaml").read_text(encoding="utf-8"))

BROKEN = "envoy file is not usable, keeping its last content"


def cluster(tree: object, name: str) -> Cluster:
    return Cluster.parse(resources(tree, "default")[CLUSTERS][name])


def test_replicas_come_from_eds_and_routes_from_rds() -> None:
    served = resources(GOOD, "default")
    assert {kind: set(named) for kind, named in served.items()} == {
        CLUSTERS: {"router", "replicas"},
        LISTENERS: {"openai"},
        ROUTES: {"openai"},
    }
    replicas = cluster(GOOD, "replicas")
    assert replicas.type == ClusterDiscoveryType.EDS
    assert replicas.eds_cluster_config
    assert replicas.eds_cluster_config.service_name == "default"
    assert replicas.load_assignment is None
    assert cluster(GOOD, "router").type == ClusterDiscoveryType.STRICT_DNS
    routes = RouteConfiguration.parse(served[ROUTES]["openai"])
    assert routes.virtual_hosts[0].routes[0].route
    assert b"route_config" not in served[LISTENERS]["openai"]
    listener = Listener.parse(served[LISTENERS]["openai"])
    assert listener.per_connection_buffer_limit_bytes == 2**26


def test_a_file_already_made_for_eds_names_its_pool() -> None:
    tree = read_yaml(ENVOY / "xds.yaml")
    assert cluster(tree, "replicas") == cluster(GOOD, "replicas")
    changed: Any = copy.deepcopy(tree)
    changed["static_resources"]["clusters"][-1]["eds_cluster_config"]["service_name"] = "batch"
    replicas = cluster(changed, "replicas")
    assert replicas.eds_cluster_config
    assert replicas.eds_cluster_config.service_name == "batch"


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("endpoint_picker", {"replicas": "EDS"}),
        ("subset", {"replicas": "EDS"}),
        ("original_dst", {"replicas": "ORIGINAL_DST"}),
        ("cluster_header", {"127.0.0.1:8001": "STATIC", "127.0.0.1:8002": "STATIC"}),
    ],
)
def test_only_clusters_of_all_replicas_come_from_eds(name: str, types: dict[str, str]) -> None:
    tree = read_yaml(ENVOY / f"{name}.yaml")
    for name, kind in types.items():
        assert cluster(tree, name).type == ClusterDiscoveryType[kind]
    assert cluster(tree, "router").type == ClusterDiscoveryType.STRICT_DNS


def test_the_file_itself_stays_as_it_was() -> None:
    tree = copy.deepcopy(GOOD)
    resources(tree, "default")
    assert tree == GOOD


def test_the_bootstraps_agree_with_the_whole_file() -> None:
    """envoy/xds.yaml is envoy/envoy.yaml but for addresses, and where the replicas come from."""
    whole, xds, everything = (
        on_loopback(ENVOY / name) for name in ("envoy.yaml", "xds.yaml", "xds_all.yaml")
    )
    *clusters, control_plane, replicas = xds["static_resources"]["clusters"]
    assert replicas.pop("type") == "EDS"
    assert replicas.pop("eds_cluster_config")["service_name"] == Config().pool
    *others, static = whole["static_resources"]["clusters"]
    for key in ("type", "dns_lookup_family", "load_assignment"):
        del static[key]
    assert (clusters, replicas) == (others, static)
    assert xds["static_resources"]["listeners"] == whole["static_resources"]["listeners"]
    assert everything["static_resources"]["clusters"] == [control_plane]
    for part in ("admin", "overload_manager"):
        assert everything[part] == xds[part] == whole[part]


def on_loopback(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"address: (0\.0\.0\.0|router),", "address: 127.0.0.1,", text))


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (None, "no bootstrap"),
        ({"listeners": []}, "no bootstrap"),
        (
            {"static_resources": {"clusters": [{"nam": "x"}]}},
            "clusters[0].nam: Cluster has no field",
        ),
        ({"static_resources": {"clusters": [{"connect_timeout": "1s"}]}}, "a Cluster has no name"),
        (
            {
                "static_resources": {
                    "clusters": [{"name": "x"}, {"name": "x", "connect_timeout": "1s"}]
                }
            },
            "two different Clusters called 'x'",
        ),
    ],
)
def test_what_cannot_be_served_is_an_error(tree: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        resources(tree, "default")


def test_routes_need_a_name() -> None:
    tree = copy.deepcopy(GOOD)
    filters = tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    del filters[0]["typed_config"]["route_config"]["name"]
    with pytest.raises(ValueError, match="route_config has no name"):
        resources(tree, "default")


def write(path: Path, text: str, at: int) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, (at, at))


def test_a_file_is_read_again_when_it_changes_and_a_broken_one_is_passed_over(
    tmp_path: Path, logged: Logged
) -> None:
    path = tmp_path / "envoy.yaml"
    write(path, yaml.safe_dump(GOOD, sort_keys=False), 1)
    file = watched(path, "default")
    assert file.read() == resources(GOOD, "default")
    assert file.news() is None
    write(path, "static_resources: {clusters: [{nam: x}]}", 2)
    assert file.news() is file.news() is None
    path.unlink()
    assert file.news() is file.news() is None
    write(path, "static_resources: {clusters: [{name: x}]}", 3)
    changed = file.news()
    assert changed is not None
    assert set(changed[CLUSTERS]) == {"x"}
    problems = [line["error"] for line in logged.lines(BROKEN)]
    assert len(problems) == 2
    assert "no field 'nam'" in str(problems[0])


def test_a_file_that_could_not_be_read_once_is_read_the_next_time(
    tmp_path: Path, logged: Logged
) -> None:
    path = tmp_path / "envoy.yaml"
    write(path, yaml.safe_dump(GOOD, sort_keys=False), 1)
    file = watched(path, "default")
    file.read()
    write(path, "static_resources: {clusters: [{name: x}]}", 2)
    with too_many_open_files():
        assert file.news() is None
    (line,) = logged.lines(BROKEN)
    assert "Too many open files" in str(line["error"])
    changed = file.news()
    assert changed is not None
    assert set(changed[CLUSTERS]) == {"x"}

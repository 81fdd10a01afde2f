"""Findings on an Envoy file."""

from collections.abc import Mapping

from extproc.config import Config
from extproc.envoy.cluster_rules import CLUSTER_RULES
from extproc.envoy.envoy_file import EXT_PROC, EnvoyFile
from extproc.envoy.finding import Finding, Level, worst_first
from extproc.envoy.rules import FILTER_RULES
from extproc.envoy.tree import CLUSTER, LISTENER, ROUTE

RULES = (*FILTER_RULES, *CLUSTER_RULES)
_NO_ENVOY = (
    "this is no Envoy file: nothing in it is a part of Envoy's configuration. Give a bootstrap, "
    "a fragment such as envoy/ext_proc.yaml, or a mesh's patch"
)
_NO_FILTER = (
    "there is no ext_proc filter: Envoy never asks the router. Take it from envoy/ext_proc.yaml"
)
_LISTENERS_ELSEWHERE = (
    "listeners come from elsewhere (lds_config), and so does the ext_proc filter: check the file "
    "that lds_config names, or what its control plane serves"
)
_COMPLETE = "Filter, listener, route and clusters are all in this file."
_INCOMPLETE = "there is no {} in this file: check the one that is used, too"
_OF_ENVOY_GATEWAY = (
    "these are resources of Envoy Gateway, which makes Envoy's configuration of them, and they are "
    "not judged here: check what it makes (egctl config envoy-proxy all)"
)


def check_envoy(tree: object, config: Config | None = None) -> list[Finding]:
    """Findings on an Envoy file, as :mod:`extproc.ground.yaml_file` read it, worst first."""
    file = EnvoyFile(tree, config)
    found = [*file.findings]
    if not file and _is_of_envoy_gateway(tree):
        found.append(Finding("is_envoy", Level.WARNING, "", _OF_ENVOY_GATEWAY))
    elif not file:
        found.append(Finding("is_envoy", Level.ERROR, "", _NO_ENVOY))
    elif not file.all(EXT_PROC) and file.takes("lds"):
        found.append(Finding("has_ext_proc", Level.WARNING, "", _LISTENERS_ELSEWHERE))
    elif not file.all(EXT_PROC):
        found.append(Finding("has_ext_proc", Level.ERROR, "", _NO_FILTER))
    elif not any(problem.level is Level.ERROR for problem in found):
        # The rules judge a file that Envoy would take.
        found.append(_completeness(file))
        for rule in RULES:
            found += rule.apply(file)
    return worst_first(found)


def _completeness(file: EnvoyFile) -> Finding:
    kinds = {"listener": LISTENER, "route": ROUTE, "cluster": CLUSTER}
    missing = " and no ".join(name for name, kind in kinds.items() if not file.all(kind))
    level = Level.WARNING if missing else Level.OK
    text = _INCOMPLETE.format(missing) if missing else _COMPLETE
    return Finding("is_complete", level, "", text)


def _is_of_envoy_gateway(tree: object) -> bool:
    documents = tree if isinstance(tree, list) else [tree]
    versions = [str(one.get("apiVersion")) for one in documents if isinstance(one, Mapping)]
    return any(one.startswith("gateway.envoyproxy.io/") for one in versions)

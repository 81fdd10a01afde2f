"""Checks an Envoy file with tables of rules."""

from collections.abc import Mapping

from extproc.config import Config
from extproc.envoy.cluster_rules import CLUSTER_RULES
from extproc.envoy.envoy_file import EXT_PROC, EnvoyFile
from extproc.envoy.finding import Finding, Level, failed, worst_first
from extproc.envoy.observer_rules import OBSERVER_RULES, only_observes
from extproc.envoy.route_rules import ROUTE_RULES
from extproc.envoy.rules import FILTER_RULES
from extproc.envoy.tree import CLUSTER, LISTENER, ROUTE

RULES = (*FILTER_RULES, *ROUTE_RULES, *CLUSTER_RULES)
_NOT_ENVOY = Finding(
    "is_envoy",
    Level.ERROR,
    "",
    "not an Envoy file: no part of Envoy's configuration was found in it. Give a bootstrap, a "
    "fragment of a bootstrap, or a patch for a mesh",
)
_ENVOY_GATEWAY = Finding(
    "is_envoy",
    Level.WARNING,
    "",
    "these are resources of Envoy Gateway, which are not checked: check the Envoy configuration "
    "that it makes of them (egctl config envoy-proxy all)",
)
_LISTENERS_ELSEWHERE = Finding(
    "has_ext_proc",
    Level.WARNING,
    "",
    "no ext_proc filter: the listeners come from elsewhere (lds_config). Check the file that "
    "lds_config names, or what its control plane serves",
)
_NO_FILTER = Finding(
    "has_ext_proc",
    Level.ERROR,
    "",
    "no ext_proc filter: Envoy never asks the router. Copy the filter from envoy/ext_proc.yaml of "
    "the project's repository",
)


def check_envoy(tree: object, config: Config | None = None) -> list[Finding]:
    """Return findings on a file that :mod:`extproc.ground.yaml_file` read, the worst first."""
    file = EnvoyFile(tree, config)
    found = [*file.findings]
    if not file:
        found.append(_ENVOY_GATEWAY if _is_envoy_gateway(tree) else _NOT_ENVOY)
    elif not file.all(EXT_PROC):
        found.append(_LISTENERS_ELSEWHERE if file.takes("lds") else _NO_FILTER)
    elif not failed(found):
        # The rules can judge only a file that Envoy would accept.
        found.append(_completeness(file))
        for rule in OBSERVER_RULES if only_observes(file) else RULES:
            found += rule.apply(file)
    return worst_first(found + file.refused)


def _completeness(file: EnvoyFile) -> Finding:
    kinds = {"listener": LISTENER, "route": ROUTE, "cluster": CLUSTER}
    missing = " and no ".join(name for name, kind in kinds.items() if not file.all(kind))
    if missing:
        text = f"this file has no {missing}: check the file that has these parts, too"
        return Finding("is_complete", Level.WARNING, "", text)
    return Finding(
        "is_complete", Level.OK, "", "The file has the filter, its listener, a route and clusters."
    )


def _is_envoy_gateway(tree: object) -> bool:
    documents = tree if isinstance(tree, list) else [tree]
    return any(
        str(document.get("apiVersion")).startswith("gateway.envoyproxy.io/")
        for document in documents
        if isinstance(document, Mapping)
    )

"""What there is to say about an Envoy file."""

from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor

from extproc.config import Config
from extproc.envoy.envoy_file import EnvoyFile, is_of_envoy_gateway
from extproc.envoy.finding import Finding, Level, worst_first
from extproc.envoy.router_rules import ROUTER_RULES
from extproc.envoy.rules import RULES

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
_OF_ENVOY_GATEWAY = (
    "these are resources of Envoy Gateway, which makes Envoy's configuration of them, and they are "
    "not judged here: check what it makes (egctl config envoy-proxy all)"
)


def check_envoy(tree: object, config: Config | None = None) -> list[Finding]:
    """Findings on an Envoy file, as :mod:`extproc.ground.yaml_file` read it, worst first."""
    file = EnvoyFile(tree, config)
    found = [*file.findings]
    if not file and is_of_envoy_gateway(tree):
        found.append(Finding("is_envoy", Level.WARNING, "", _OF_ENVOY_GATEWAY))
    elif not file:
        found.append(Finding("is_envoy", Level.ERROR, "", _NO_ENVOY))
    elif not file.has(ExternalProcessor) and file.takes_listeners:
        found.append(Finding("has_ext_proc", Level.WARNING, "", _LISTENERS_ELSEWHERE))
    elif not file.has(ExternalProcessor):
        found.append(Finding("has_ext_proc", Level.ERROR, "", _NO_FILTER))
    elif not any(problem.level is Level.ERROR for problem in found):
        # The rules judge a file that Envoy would take.
        for rule in (*RULES, *ROUTER_RULES):
            found += rule.apply(file)
    return worst_first(found)

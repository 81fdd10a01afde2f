"""``extproc check``: reads, judges, prints."""

import argparse
import os
import sys
from itertools import starmap
from pathlib import Path

from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor

from extproc import settings
from extproc.check.envoy_file import EnvoyFile, is_of_envoy_gateway
from extproc.check.rules import RULES
from extproc.check.serving import rules_for
from extproc.config import Config, ModelTargets, PoolReplicas, ServeSettings, TlsFiles, XdsSettings
from extproc.envoy.finding import Finding, Level
from extproc.request.tokens import TokenCounter, TokenizerError
from extproc.server import certificates
from extproc.store.connection import address, connect
from extproc.yaml_file import read_yaml

_NO_ENVOY = (
    "this is no Envoy file: nothing in it is a part of Envoy's configuration. Give a bootstrap, "
    "a fragment such as envoy/ext_proc.yaml, or a mesh's patch"
)
_NO_FILTER = (
    "there is no ext_proc filter: Envoy never asks the router. Take it from envoy/ext_proc.yaml"
)
_LISTENERS_ELSEWHERE = (
    "listeners come from a control plane (lds_config), and so does the ext_proc filter: check "
    "what it serves, too; of 'extproc xds' that is the file xds.envoy_file"
)
_OF_ENVOY_GATEWAY = (
    "these are resources of Envoy Gateway, which makes Envoy's configuration of them, and they are "
    "not judged here: check what it makes (egctl config envoy-proxy all)"
)
_SERVE = ServeSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--envoy`` and the configuration's flags."""
    parser.add_argument(
        "--envoy", type=Path, metavar="FILE", help="Envoy bootstrap, fragment or patch (YAML, JSON)"
    )
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what is understood and found; 1 if there is an error, else 0."""
    try:
        config = settings.load(settings.flags_of(args), os.environ, args.config)
        TokenCounter(config.request)
        doubts = [*_doubts("serve", config.serve), *_doubts("xds", config.xds)]
    except settings.ConfigError as error:
        return _wrong(error.problems)
    except TokenizerError as error:
        return _wrong([f"request.tokenizers: {error}"])
    except certificates.CertificateError as error:
        return _wrong([str(error)])
    if args.envoy is None or args.config or config != Config():
        print(understood(config))
    for doubt in doubts:
        print(f"{Level.WARNING:<8} {doubt}: Envoy will not trust it", file=sys.stderr)
    return 0 if args.envoy is None else _check(args.envoy, config.serve)


def _doubts(section: str, files: TlsFiles) -> list[str]:
    """What Envoy will have against the certificate of a section, if anything.

    Raises:
        CertificateError: it cannot be used at all.
    """
    doubt = "" if files.tls_cert is None else certificates.read(files, section).doubt
    return [f"{section}.tls_cert: {doubt}"] if doubt else []


def _check(path: Path, serve: ServeSettings) -> int:
    try:
        tree = read_yaml(path)
    except OSError as error:
        return _wrong([f"{path}: cannot be read: {error.strerror}"])
    except ValueError as error:
        return _wrong([f"{path}: {error}"])
    findings = check_envoy(tree, serve)
    print(path)
    for finding in findings:
        print(finding)
    return int(any(finding.level is Level.ERROR for finding in findings))


def _wrong(problems: list[str]) -> int:
    for problem in problems:
        print(f"{Level.ERROR:<8} {problem}", file=sys.stderr)
    return 1


def check_envoy(tree: object, serve: ServeSettings = _SERVE) -> list[Finding]:
    """What there is to say about an Envoy file, worst first.

    Args:
        tree: what is in it, as :func:`extproc.yaml_file.read_yaml` returns it.
        serve: how each router is configured.
    """
    file = EnvoyFile(tree)
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
        rules = [*RULES, *rules_for(serve)]
        found += [finding for rule in rules for finding in rule.apply(file)]
    order = list(Level)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.level))


def _kept(config: Config) -> str:
    if config.state == "memory":
        return "in the memory of the only router"
    return f"shared in {address(connect(config.redis.url, config.pool))}"


def _poller(config: Config) -> str:
    return "in the router" if config.state == "memory" else f"{config.poll.admin} for people"


def understood(config: Config) -> str:
    """The configuration in a few lines."""
    lines = {
        "pool": f"{config.pool}, {_kept(config)}",
        "router": _router(config.serve),
        "policy": config.route.policy,
        "poller": f"every {config.poll.interval_s:g} s, {_poller(config)}",
        "replicas": _replicas(config) or "none: a poller has nothing to do",
    }
    if config.route.models:
        lines["models"] = "; ".join(starmap(_leads_to, config.route.models.items()))
    if config.xds != XdsSettings():
        lines["xds"] = f"{config.xds.listen} for Envoy{_tls(config.xds)}"
    others = [f"pool {name}: {_replicas(pool) or 'none'}" for name, pool in config.pools.items()]
    return "\n".join([*(f"{name:<8} {text}" for name, text in lines.items()), *others])


def _leads_to(name: str, targets: ModelTargets) -> str:
    if isinstance(targets, tuple):
        return f"{name}: served as {' or '.join(targets)}"
    total = sum(targets.values())
    return f"{name}: " + ", ".join(f"{part / total:.1%} {one}" for one, part in targets.items())


def _replicas(pool: PoolReplicas) -> str:
    replicas = [f"{one.url or one.dns} ({one.profile})" for one in pool.replicas]
    if pool.replicas_file:
        replicas.append(f"those in {pool.replicas_file}")
    return ", ".join(replicas)


def _router(serve: ServeSettings) -> str:
    first = f"{serve.listen} for Envoy{_tls(serve)}, {serve.admin} for people"
    others = serve.workers - 1
    return f"{first}; {others} more on the next ports" if others else first


def _tls(files: TlsFiles) -> str:
    if files.tls_cert is None:
        return ""
    return " (TLS)" if files.tls_client_ca is None else " (mTLS)"

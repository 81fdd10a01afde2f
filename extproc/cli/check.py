"""``extproc check``: prints findings on a configuration, an Envoy file or running parts."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from extproc.cli.arguments import CommandError, UsageError
from extproc.cli.configuration import add_flags, configured
from extproc.config import Config, MutualTlsSettings, TlsSettings
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Finding, Level
from extproc.envoy.live import check_live, check_replicas_files
from extproc.ground import tls
from extproc.ground.text import printable
from extproc.ground.yaml_file import read_yaml
from extproc.observe.admin import read_token
from extproc.observe.traces import Traces
from extproc.poll.discovery import require_client
from extproc.request.tokens import TokenCounter, TokenizerError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    file = "check an Envoy bootstrap, fragment or patch (YAML, JSON)"
    add("--envoy", type=Path, metavar="FILE", help=file)
    add("--live", action="store_true", help="check the running Redis and replicas")
    admin = "as --live, and check the running Envoy that has this admin address"
    add("--envoy-admin", metavar="URL", help=admin)
    add_flags(parser)
    parser.epilog = "Every key of the configuration is also a flag, such as --route.policy lmetric."


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    try:
        TokenCounter(config.request)
        require_client(config)
        doubts = [
            *_certificate_doubts("serve", config.serve, "Envoy"),
            *_certificate_doubts("eds", config.eds, "Envoy"),
            *_certificate_doubts("admin", config.admin, "Prometheus and browsers"),
        ]
        if config.admin.token_file is not None:
            read_token(config.admin.token_file)
        if config.traces.endpoint is not None:
            Traces(config.traces.endpoint).close()
    except TokenizerError as error:
        raise UsageError(f"request.tokenizers: {error}") from None
    except ValueError as error:
        raise UsageError(error) from None
    for doubt in doubts:
        print(f"{Level.WARNING:<8} {doubt}", file=sys.stderr)
    print("The configuration is valid.")
    findings = _printed(check_replicas_files(config))
    if args.envoy is not None:
        findings += _check_file(args.envoy, config)
    if args.live or args.envoy_admin is not None:
        # The checks use parts that log their failures, which here are findings: print them once.
        logging.getLogger("extproc").addHandler(logging.NullHandler())
        findings += _printed(asyncio.run(check_live(config, args.envoy_admin)))
    return int(any(finding.level is Level.ERROR for finding in findings))


def _certificate_doubts(section: str, files: TlsSettings, peers: str) -> list[str]:
    """Return the reason why ``peers`` will not trust the certificate of a section, if any."""
    authority = files.tls_client_ca if isinstance(files, MutualTlsSettings) else None
    doubt = "" if files.tls_cert is None else tls.read(files, section, authority).doubt
    return [f"{section}.tls_cert: {doubt}: {peers} will not trust it"] if doubt else []


def _check_file(path: Path, config: Config) -> list[Finding]:
    try:
        tree = read_yaml(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None
    findings = check_envoy(tree, config)
    print(path)
    return _printed(findings)


def _printed(findings: list[Finding]) -> list[Finding]:
    for finding in findings:
        print(printable(str(finding)))
    return findings

"""``extproc check``: prints findings on a configuration, an Envoy file or running parts."""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from extproc.cli.arguments import CommandError, UsageError
from extproc.cli.configuration import add_flags, configured
from extproc.config import Config, MutualTlsSettings, TlsSettings
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Finding, Level, failed
from extproc.envoy.live import check_live, check_replicas
from extproc.ground import tls
from extproc.ground.text import printable
from extproc.ground.yaml_file import read_yaml
from extproc.observe.admin import read_token
from extproc.observe.traces import Traces
from extproc.poll.discovery import require_client
from extproc.request.tokens import TokenCounter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    file = "check an Envoy bootstrap, fragment or patch (YAML, JSON)"
    add("--envoy", type=Path, metavar="FILE", help=file)
    live = "check the running Redis, routers, pollers and replicas"
    add("--live", action="store_true", help=live)
    admin = "as --live, and check the running Envoy that has this admin address"
    add("--envoy-admin", metavar="URL", help=admin)
    add("--json", action="store_true", help="print the findings as JSON")
    add_flags(parser)
    parser.epilog = "Every key of the configuration is also a flag, such as --route.policy lmetric."


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    request = config.request
    try:
        TokenCounter(request.bytes_per_token, request.image_tokens, request.tokenizers)
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
    except ValueError as error:
        raise UsageError(error) from None
    first = [*doubts, *_check_empty(args.config), *check_replicas(config)]
    found = {
        "The configuration has errors:" if failed(first) else "The configuration is valid.": first
    }
    if args.envoy is not None:
        found[str(args.envoy)] = _check_file(args.envoy, config)
    if args.live or args.envoy_admin is not None:
        found["What runs:"] = asyncio.run(check_live(config, args.envoy_admin))
    findings = [finding for part in found.values() for finding in part]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for heading, part in found.items():
            print(heading, *(printable(str(finding)) for finding in part), sep="\n")
    return int(failed(findings))


def _check_empty(file: Path | None) -> list[Finding]:
    if file is None or read_yaml(file) is not None:
        return []
    text = "empty: every setting has its default, and no replica is polled. Set replicas"
    return [Finding("file", Level.ERROR, str(file), text)]


def _certificate_doubts(section: str, files: TlsSettings, peers: str) -> list[Finding]:
    """Return a warning if ``peers`` will not trust the certificate of a configuration section."""
    authority = files.tls_client_ca if isinstance(files, MutualTlsSettings) else None
    cert, key = files.tls_cert, files.tls_key
    doubt = "" if cert is None else tls.read(section, cert, key, authority).doubt
    text = f"{doubt}: {peers} will not trust it"
    return [Finding("certificate", Level.WARNING, f"{section}.tls_cert", text)] if doubt else []


def _check_file(path: Path, config: Config) -> list[Finding]:
    try:
        tree = read_yaml(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None
    return check_envoy(tree, config)

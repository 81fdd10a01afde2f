"""``extproc report``: collects in one archive what a bug report needs."""

import argparse
import asyncio
import io
import platform
import re
import sys
import tarfile
from collections.abc import Iterable
from contextlib import aclosing
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from extproc.cli.arguments import CommandError
from extproc.cli.configuration import add_file, configured
from extproc.config import Config
from extproc.envoy.live import check_live, check_replicas
from extproc.ground.version import described
from extproc.observe.client import RouterUnavailableError, fetch_page, follow

_PAGES = {"fleet.json": "/fleet", "decisions.json": "/decisions", "metrics.txt": "/metrics"}
_SECRET = re.compile(r"(?<=://)[^?\s]+(?=@)|(?<=password=)[^&\s]+")  # logins and passwords in URLs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    file = "archive to write (default: %(default)s)"
    add("--output", type=Path, default=Path("extproc-report.tar.gz"), metavar="FILE", help=file)
    add("--router", metavar="URL", help="admin address of the router (default: serve.admin)")
    admin = "check the running Envoy that has this admin address, too"
    add("--envoy-admin", metavar="URL", help=admin)
    add_file(parser)
    parser.epilog = (
        "The archive has no prompts, responses or passwords. It has addresses, names of models, "
        "and request ids and tenants of the last decisions: read it before you publish it."
    )


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    shown = yaml.safe_dump(_without_secrets(config.model_dump(mode="json")), sort_keys=False)
    files = {"versions.txt": _versions(), "configuration.yaml": shown.encode()}
    files |= asyncio.run(_running(config, args.router or config.serve.admin, args.envoy_admin))
    try:
        with tarfile.open(args.output, "w:gz") as archive:
            for name, text in files.items():
                entry = tarfile.TarInfo(f"extproc-report/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    except OSError as error:
        raise CommandError(f"cannot write {args.output}: {error.strerror}") from None
    # On stderr, because ``--output /dev/stdout`` takes the archive out of a container.
    print(f"{args.output} has {', '.join(files)}: read it before you publish it.", file=sys.stderr)
    return 0


async def _running(config: Config, router: str, envoy_admin: str | None) -> dict[str, bytes]:
    """Files of the archive, by name: findings, and the router's pages or why it did not answer."""
    findings = [*check_replicas(config), *await check_live(config, envoy_admin)]
    files = {"findings.txt": _lines(findings)}
    try:
        files |= {
            name: await fetch_page(router, path, config.admin) for name, path in _PAGES.items()
        }
        async with aclosing(follow(router, config.admin)) as snapshots:
            files["warnings.txt"] = _lines((await anext(snapshots)).get("warnings", ()))
    except (RouterUnavailableError, ValueError) as error:
        files["router.txt"] = _lines([error])
    return files


def _versions() -> bytes:
    system = f"Python {platform.python_version()}, {platform.platform()}"
    packages = {f"{package.name} {package.version}" for package in distributions()}
    return _lines([f"extproc {described()}", system, *sorted(packages, key=str.lower)])


def _lines(lines: Iterable[object]) -> bytes:
    return "".join(f"{_SECRET.sub('***', str(line))}\n" for line in lines).encode()


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "***" if each and "password" in name else _without_secrets(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return _SECRET.sub("***", value) if isinstance(value, str) else value

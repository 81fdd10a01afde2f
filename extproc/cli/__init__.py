"""Command ``extproc``: imports only the module of the command that runs.

A command's module has ``add_arguments(parser)`` and ``run(args)``, which returns the exit status:
0 success, 1 failure, 2 wrong usage. Errors are :class:`~extproc.cli.arguments.CommandError`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from errno import ENOSPC, EPIPE
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from extproc.cli.arguments import CommandError, Parser
from extproc.ground.garbage import never_garbage

_COMMANDS = {  # module and summary of each command
    "serve": ("services", "Runs a router: the ext_proc server of Envoy."),
    "poll": ("services", "Runs a poller: scrapes the replicas and writes their state to Redis."),
    "eds": ("services", "Runs an EDS server, which tells Envoy the replicas."),
    "check": ("check", "Finds mistakes in a configuration, an Envoy file, or a running system."),
    "top": ("look", "Shows the running routers and their fleet, live."),
    "explain": ("look", "Shows the last decisions of the running routers, with the reasons."),
    "report": ("report", "Collects versions, configuration, fleet and decisions for a bug report."),
    "what-if": ("what_if", "Replays recorded traffic with another policy or other replicas."),
    "replicas": ("replicas", "Lists, drains and undrains replicas."),
    "simulate": ("simulate", "Runs a simulated vLLM replica."),
    "demo": ("demo", "Runs Envoy, Redis, four simulated replicas, a poller and a router."),
    "completion": (
        "completion",
        "Prints a script with which a shell completes commands and options.",
    ),
}
_FILE = "edit the file that 'replicas_file' names: pollers follow its changes"
_REMOVED = {  # commands of earlier versions, and their replacements
    "replica": "use 'extproc simulate'",
    "xds": "use 'extproc eds'",
    "replicas add": f"{_FILE}; to undo a drain, use 'extproc replicas undrain'",
    "replicas remove": _FILE,
}


def main(argv: Sequence[str] | None = None) -> int:
    # If a standard stream is closed, the event loop would use its number, and abort at the end.
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    # Else Linux drops the signal if this process is a container's first, and has no handler yet.
    with suppress(ValueError):  # not the main thread
        # 128 + SIGTERM, as shells count. Python would drop a SystemExit in a weakref's callback.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    if isinstance(sys.stdout, TextIOWrapper):  # None if closed
        sys.stdout.reconfigure(errors="replace")  # "?" for what the terminal's encoding lacks
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # fails here at the latest if stdout takes nothing
    except OSError as error:
        if error.errno not in (EPIPE, ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if error.errno == EPIPE:
            return 141  # 128 + SIGPIPE, as shells count
        print(f"extproc: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    for name in (" ".join(words[:count]) for count in (1, 2)):
        if instead := _REMOVED.get(name):
            print(f"extproc {name} was removed: {instead}", file=sys.stderr)
            return 2
    args = command_line().parse_args(words)
    from extproc.ground.runtime import allow_many_connections  # takes 0.1 s, too long for help

    allow_many_connections()
    try:
        return int(args.run(args))
    except CommandError as error:
        for problem in error.args:
            print(f"extproc {args.command}: {problem}", file=sys.stderr)
        return error.status


def command_line(whole: bool = False) -> Parser:
    """Return the parser of all commands. ``whole``: load the options of every command at once;
    otherwise each command loads its options only if it runs."""
    parser = Parser(
        prog="extproc",
        usage="%(prog)s COMMAND [OPTION]...",
        description="Sends each request to the vLLM replica that finishes it soonest.",
    )
    about = "print version and commit, and exit"
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help=about)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="extproc", parser_class=_Command
    )
    for name, (_, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if whole:
            command.load()
    return parser


class _PrintVersion(argparse.Action):
    """Option that prints version and commit, and looks up the commit only if given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from extproc.ground.version import described

        print(f"extproc {described()}")
        parser.exit()


class _Command(Parser):
    """Parser that imports a command and adds the command's options only if the command runs."""

    def load(self) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or gRPC's C core adds log lines
        module, _ = _COMMANDS[self.prog.split()[-1]]
        with never_garbage():
            command = import_module(f"extproc.cli.{module}")
        command.add_arguments(self)
        self.set_defaults(run=command.run)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(args, namespace)

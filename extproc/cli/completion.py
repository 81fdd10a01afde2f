"""``extproc completion SHELL``: a script with which the shell completes commands and options."""

import argparse

import shtab

from extproc.cli import command_line

_SHELLS = "bash", "zsh", "fish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SHELL"
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    print(shtab.complete(command_line(whole=True), args.shell))
    return 0

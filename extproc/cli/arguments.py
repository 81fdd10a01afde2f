"""Arguments that commands have in common: how a mistake is told, and what numbers may be."""

import argparse
import sys
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn

from extproc.nearest import nearest


class Parser(argparse.ArgumentParser):
    """Answers a mistake with two lines: the usage, and what is wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"usage": "%(prog)s [OPTION]..."} | options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but nothing may be unknown."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]  # the rest may be a password
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {name!r}{nearest(name, options)}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")


def whole(least: int, most: float = inf) -> Callable[[str], int]:
    """The type of an argument that is a whole number within limits."""
    wanted = f"a whole number from {least} {'on' if most == inf else f'to {most}'}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return parse


def number(text: str) -> float:
    """The type of an argument that is a finite number from 0 on.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def above_zero(text: str) -> float:
    """The type of an argument that is a finite number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not (value := number(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def probability(text: str) -> float:
    """The type of an argument that is a number from 0 to 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if (value := number(text)) > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value

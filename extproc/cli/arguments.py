"""Arguments and errors that commands have in common."""

import argparse
import sys
from collections.abc import Callable
from math import inf, nan
from typing import Any, NoReturn

from extproc.ground.text import suggest


class CommandError(Exception):
    """The command failed: each problem is a line that says why, and what to do."""

    status = 1

    def __init__(self, *problems: object) -> None:
        super().__init__(*problems)
        self.problems = problems


class UsageError(CommandError):
    """The command was wrongly asked: flags that do not go together, or a wrong configuration."""

    status = 2


class Parser(argparse.ArgumentParser):
    """Answers a mistake with two lines: the usage, and what is wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"usage": "%(prog)s [OPTION]..."} | options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but nothing may be unknown."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]  # the rest may be a password
            if instead := _replacement(name.removeprefix("--")):
                self.error(f"argument {name!r} was removed: {instead}")
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {name!r}{suggest(name, options)}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")


def _replacement(option: str) -> str:
    """Returns what to use in place of a removed setting, or of its short form for ``serve``."""
    from extproc.config import REMOVED  # takes a quarter of a second, which help need not wait for

    return REMOVED.get(option) or REMOVED.get(f"serve.{option}", "")


def whole(least: int, most: float = inf) -> Callable[[str], int]:
    """The type of an argument that is a whole number within limits."""
    wanted = f"a whole number from {least} {'on' if most == inf else f'to {most}'}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return parse


def _real(wanted: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of an argument that is such a number."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


number = _real("a number from 0 on", lambda value: 0 <= value < inf)
above_zero = _real("a number above 0", lambda value: 0 < value < inf)
probability = _real("a number from 0 to 1", lambda value: 0 <= value <= 1)

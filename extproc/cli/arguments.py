"""Arguments and errors that several commands use."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

from extproc.ground.text import suggest

N = TypeVar("N", int, float)


class CommandError(Exception):
    """Failure of a command; ``args``: lines, each with a problem and its remedy."""

    status = 1


class UsageError(CommandError):
    """Wrong arguments or a wrong configuration."""

    status = 2


class Parser(argparse.ArgumentParser):
    """Parser of exact options, which names the replacement of a removed or misspelt option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"usage": "%(prog)s [OPTION]..."} | options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from extproc.config import REMOVED  # this import takes 0.25 s, too long for help

            name = unknown[0].partition("=")[0]  # the value may be a password
            option = name.removeprefix("--")
            if instead := REMOVED.get(option) or REMOVED.get(f"serve.{option}"):
                self.error(f"argument {name!r} was removed: {instead}")
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument {name!r}{suggest(name, options)}")
        return parsed, []


def whole(least: int, most: float = inf) -> Callable[[str], int]:
    """Return an argument type for argparse: a whole number from ``least`` to ``most``."""
    limits = f"from {least} {'on' if most == inf else f'to {most}'}"
    return _checked(int, f"a whole number {limits}", lambda value: least <= value <= most)


def _checked(
    kind: Callable[[str], N], wanted: str, holds: Callable[[N], bool]
) -> Callable[[str], N]:
    def parse(text: str) -> N:
        with suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


number = _checked(float, "a number from 0 on", lambda value: 0 <= value < inf)
above_zero = _checked(float, "a number above 0", lambda value: 0 < value < inf)
probability = _checked(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)

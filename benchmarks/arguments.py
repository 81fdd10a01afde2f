"""What command lines have in common: values that argparse refuses where they make no sense."""

import argparse
from math import inf, nan
from pathlib import Path


def paths(text: str) -> list[Path]:
    """Files with commas between."""
    return [Path(part) for part in text.split(",")]


def positive(text: str) -> float:
    """A finite number above 0."""
    number = _float(text)
    require(0 < number < inf, text, "a finite number above 0")
    return number


def time(text: str) -> float:
    """A finite number of at least 0."""
    number = _float(text)
    require(0 <= number < inf, text, "a finite number of at least 0")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = _float(text)
    require(0 <= number <= 1, text, "a number from 0 to 1")
    return number


def count(text: str) -> int:
    """A whole number of at least 1."""
    require(text.isdecimal() and int(text) >= 1, text, "a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between."""
    return [count(part) for part in text.split(",")]


def number(text: str) -> int:
    """A whole number of at least 0."""
    require(text.isdecimal(), text, "a whole number of at least 0")
    return int(text)


def among(text: str, known: list[str]) -> list[str]:
    """Names with commas between, all of them known."""
    for part in text.split(","):
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
    return text.split(",")


def require(sensible: bool, text: str, what: str) -> None:
    """Raises ArgumentTypeError unless a value is sensible."""
    if not sensible:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan

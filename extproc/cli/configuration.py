"""Configuration on the command line: a file, and a flag for every key."""

import argparse
import os
from pathlib import Path

from extproc import settings
from extproc.cli.arguments import Parser, UsageError
from extproc.config import Config


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    text = f"YAML file (or the variable {settings.ENV_FILE})"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)


def add_flags(parser: Parser, *shown: str) -> None:
    """Add ``--config`` and a flag for every key; the help shows only these sections and keys.

    Every command accepts every key, so that one line of flags fits all commands.
    """
    add_file(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    flags: dict[str, argparse.Action] = {}
    for key in settings.LEAVES:
        section = key.rpartition(".")[0]
        if key not in shown and section not in shown:
            add_flag(parser, key).help = argparse.SUPPRESS
            continue
        if section not in groups:
            about = Config.model_fields[section].annotation.__doc__ if section else None
            groups[section] = parser.add_argument_group(section or "general", about)
        flags[key] = add_flag(groups[section], key)

    def describe() -> None:
        for key, flag in flags.items():
            flag.help = described(key)

    parser.before_help = describe


def add_flag(parser: argparse._ActionsContainer, key: str) -> argparse.Action:
    return parser.add_argument(f"--{key}", dest=key, default=argparse.SUPPRESS, metavar="VALUE")


def described(key: str) -> str:
    """Return the help of a key: its description and default."""
    text, field = settings.description(key).replace("``", ""), settings.LEAVES[key]
    if field.default_factory is None and field.default not in ((), None, ""):
        text = f"{text} (default: {field.default})".strip()
    return text.replace("%", "%%")


def configured(args: argparse.Namespace) -> Config:
    """Load the configuration from flags, environment and file."""
    flags = {key: text for key, text in vars(args).items() if key in settings.LEAVES}
    try:
        return settings.load(flags, os.environ, args.config)
    except settings.ConfigError as error:
        raise UsageError(*error.problems) from None

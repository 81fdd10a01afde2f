"""Configuration on the command line: a file, and a flag for every key."""

import argparse
import os
from itertools import groupby
from pathlib import Path

from extproc import settings
from extproc.cli.arguments import UsageError
from extproc.config import Config


def add_file(parser: argparse.ArgumentParser) -> None:
    text = f"YAML file (or the variable {settings.ENV_FILE})"
    file = os.environ.get(settings.ENV_FILE) or None
    parser.add_argument("--config", type=Path, default=file, metavar="FILE", help=text)


def add_flags(parser: argparse.ArgumentParser, *shown: str) -> None:
    """Add ``--config`` and a flag for every key; the help has only the sections and keys ``shown``.

    Every command accepts every key, so that one line of flags fits all commands.
    """
    add_file(parser)
    for section, keys in groupby(settings.LEAVES, lambda key: key.rpartition(".")[0]):
        described = section and section in shown
        about = Config.model_fields[section].annotation.__doc__ if described else None
        group = parser.add_argument_group(section or "general", about)
        for key in keys:
            add_flag(group, key, key in shown or section in shown)


def add_flag(parser: argparse._ActionsContainer, key: str, shown: bool = True) -> None:
    field = settings.LEAVES[key]
    text = (field.description or "").replace("``", "")
    if field.default_factory is None and field.default not in ((), None, ""):
        text = f"{text} (default: {field.default})".strip()
    parser.add_argument(
        f"--{key}",
        dest=key,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help=text.replace("%", "%%") if shown else argparse.SUPPRESS,
    )


def configured(args: argparse.Namespace) -> Config:
    """Load the configuration from flags, environment and file."""
    flags = {key: text for key, text in vars(args).items() if key in settings.LEAVES}
    try:
        return settings.load(flags, os.environ, args.config)
    except settings.ConfigError as error:
        raise UsageError(*error.args) from None

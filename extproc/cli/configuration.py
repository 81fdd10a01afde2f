"""Configuration on the command line: a file, and a flag for every key."""

import argparse
import os
from pathlib import Path

from extproc import settings
from extproc.cli.arguments import UsageError
from extproc.config import Config


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    text = f"YAML file (or the variable {settings.ENV_FILE})"
    file = os.environ.get(settings.ENV_FILE) or None
    parser.add_argument("--config", type=Path, default=file, metavar="FILE", help=text)


def add_flags(parser: argparse.ArgumentParser, *shown: str) -> None:
    """Add ``--config`` and a flag for every key; the help has only the sections and keys ``shown``.

    Every command accepts every key, so that one line of flags fits all commands.
    """
    add_file(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in settings.LEAVES:
        section = key.rpartition(".")[0]
        is_shown = key in shown or section in shown
        if is_shown and section not in groups:
            about = Config.model_fields[section].annotation.__doc__ if section else None
            groups[section] = parser.add_argument_group(section or "general", about)
        add_flag(groups[section] if is_shown else parser, key, is_shown)


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

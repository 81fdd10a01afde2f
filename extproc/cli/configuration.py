"""The configuration on the command line: a file, and a flag for every key."""

import argparse
import os
from pathlib import Path

from pydantic.fields import FieldInfo

from extproc import settings
from extproc.cli.arguments import UsageError
from extproc.config import Config


def add_file(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config``."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"YAML file (or the variable {settings.ENV_FILE})",
    )


def add_flags(parser: argparse.ArgumentParser, *shown: str) -> None:
    """Adds ``--config`` and a flag for every key; the help shows these sections and keys alone.

    The others are taken all the same, so that one line of flags does for all commands.
    """
    add_file(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in settings.LEAVES:
        section = key.rpartition(".")[0]
        if key not in shown and section not in shown:
            add_flag(parser, key, shown=False)
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(*_section_help(section))
        add_flag(groups[section], key)


def add_flag(parser: argparse._ActionsContainer, key: str, shown: bool = True) -> None:
    """Adds the flag of one key."""
    parser.add_argument(
        f"--{key}",
        dest=key,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help=_field_help(settings.LEAVES[key]).replace("%", "%%") if shown else argparse.SUPPRESS,
    )


def configured(args: argparse.Namespace) -> Config:
    """The configuration that flags, environment and file make together."""
    flags = {key: text for key, text in vars(args).items() if key in settings.LEAVES}
    try:
        return settings.load(flags, os.environ, args.config)
    except settings.ConfigError as error:
        raise UsageError(*error.problems) from None


def _section_help(section: str) -> tuple[str, str | None]:
    if not section:
        return "general", None
    annotation = Config.model_fields[section].annotation
    return section, getattr(annotation, "__doc__", None)


def _field_help(field: FieldInfo) -> str:
    text = (field.description or "").replace("``", "")
    if field.default_factory is not None or field.default in ((), None, ""):
        return text
    return f"{text} (default: {field.default})".strip()

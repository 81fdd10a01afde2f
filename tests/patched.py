"""Runs a command of the package with other values for some constants."""

import json
import sys
from collections.abc import Mapping
from importlib import import_module

from extproc.cli import main


def patched(constants: Mapping[str, object], *arguments: str) -> list[str]:
    """Returns the command line of ``extproc ARGUMENTS`` with these ``module.NAME`` constants."""
    values = {name: str(value) for name, value in constants.items()}
    return [sys.executable, "-P", __file__, json.dumps(values), *arguments]


if __name__ == "__main__":
    for name, value in json.loads(sys.argv[1]).items():
        module, _, constant = name.rpartition(".")
        holder = import_module(module)
        setattr(holder, constant, type(getattr(holder, constant))(value))
    sys.exit(main(sys.argv[2:]))

"""A command of the package in which some constants have other values."""

import json
import sys
from collections.abc import Mapping
from importlib import import_module

from extproc.cli import main


def patched(constants: Mapping[str, object], *arguments: str) -> list[str]:
    """What to start for ``extproc ARGUMENTS`` with these constants, by ``module.NAME``."""
    values = {name: str(value) for name, value in constants.items()}
    return [sys.executable, "-P", __file__, json.dumps(values), *arguments]


if __name__ == "__main__":
    for name, value in json.loads(sys.argv[1]).items():
        module, _, constant = name.rpartition(".")
        holder = import_module(module)
        setattr(holder, constant, type(getattr(holder, constant))(value))
    sys.exit(main(sys.argv[2:]))

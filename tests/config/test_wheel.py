"""What `pip install` brings: every file of the package, and the command."""

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "extproc"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_is_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["extproc"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file()}
    sources = {path for path in files if path.suffix in (".py", ".pyc")}
    assert files - sources == packed
    assert PACKAGE / "lab/harness/envoy.yaml" in packed
    # setuptools finds a package by its __init__.py.
    assert all((path.parent / "__init__.py").exists() for path in sources if path.suffix == ".py")


def test_the_command_is_there() -> None:
    module, _, name = PYPROJECT["project"]["scripts"]["extproc"].partition(":")
    assert callable(getattr(import_module(module), name))

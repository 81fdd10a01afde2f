"""The wheel holds every file; the image holds tested versions of its requirements."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "extproc"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_every_file_is_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["extproc"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file()}
    sources = {path for path in files if path.suffix in (".py", ".pyc")}
    assert files - sources == packed
    assert PACKAGE / "lab/harness/envoy.yaml" in packed
    # setuptools finds a package by its __init__.py.
    assert all((path.parent / "__init__.py").exists() for path in sources if path.suffix == ".py")


def test_wheel_installs_the_command() -> None:
    module, _, name = PROJECT["scripts"]["extproc"].partition(":")
    assert callable(getattr(import_module(module), name))


def pinned(name: str) -> set[tuple[str, str]]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", text, re.MULTILINE))


def names(*requirements: str) -> set[str]:
    found = (re.match(r"[A-Za-z0-9-]+", requirement) for requirement in requirements)
    return {match[0].lower() for match in found if match}


def test_package_chart_and_changelog_name_one_version() -> None:
    chart = yaml.safe_load((ROOT / "docs/helm/Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$", changelog, re.MULTILINE)
    assert released[0] == PROJECT["version"]


def test_image_has_tested_versions_and_no_test_tools() -> None:
    image = pinned("requirements-image.txt")
    installed = {name for name, _ in image}
    extras = PROJECT["optional-dependencies"]
    assert image < pinned("requirements.txt")
    of_the_image = (*extras["kubernetes"], *extras["tokenizers"], *extras["traces"])
    assert names(*PROJECT["dependencies"], *of_the_image) <= installed
    assert not names(*extras["demo"], *extras["bench"], *extras["dev"]) & installed

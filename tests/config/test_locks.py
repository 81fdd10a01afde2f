"""What the image installs: the package's own needs, in the versions that are tested."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PIN = re.compile(r"^([a-z0-9-]+)==([^ ;]+)", re.MULTILINE)


def pinned(name: str) -> set[tuple[str, str]]:
    return set(_PIN.findall((ROOT / name).read_text(encoding="utf-8")))


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9-]+", one) for one in requirements)
    return {match[0].lower() for match in found if match}


def test_the_image_has_versions_that_are_tested_and_no_tool_of_the_tests() -> None:
    image = pinned("requirements-image.txt")
    installed = {name for name, _ in image}
    extras = PROJECT["optional-dependencies"]
    assert image < pinned("requirements.txt")
    of_the_image = [*extras["kubernetes"], *extras["tokenizers"], *extras["traces"]]
    assert names([*PROJECT["dependencies"], *of_the_image]) <= installed
    assert not names([*extras["demo"], *extras["bench"], *extras["dev"]]) & installed

"""The files in ``envoy/`` are what their templates make.

    python -m tests.envoy.test_templates

writes them anew.
"""

from pathlib import Path
from textwrap import dedent, indent

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ENVOY = Path(__file__).parents[2] / "envoy"
TEMPLATES = Environment(
    loader=FileSystemLoader(ENVOY / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
FILES = [name.removesuffix(".j2") for name in TEMPLATES.list_templates() if name != "base.yaml.j2"]


def at(block: str, column: int) -> str:
    """The block, put where a line has come to that column."""
    return indent(dedent(block).strip("\n"), " " * column)[column:]


TEMPLATES.filters["at"] = at


def made(name: str) -> str:
    return TEMPLATES.get_template(f"{name}.j2").render()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_its_template_makes(name: str) -> None:
    text = (ENVOY / name).read_text(encoding="utf-8")
    assert text == made(name), f"change envoy/templates/{name}.j2, then run: make envoy-files"


if __name__ == "__main__":
    for _name in FILES:
        (ENVOY / _name).write_text(made(_name), encoding="utf-8")

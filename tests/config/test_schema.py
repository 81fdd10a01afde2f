"""``docs/extproc.schema.json`` is the JSON schema of the configuration, for editors.

``python -m tests.config.test_schema`` writes it anew.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from extproc.config import Config

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "extproc.schema.json"


def schema() -> dict[str, Any]:
    """The schema that pydantic generates, with the short forms of ``replicas`` and
    ``route.models``."""
    made = Config.model_json_schema()
    for part in (made, made["$defs"]["PoolReplicas"]):
        replicas = part["properties"]["replicas"]
        items = {"anyOf": [{"type": "string"}, replicas.pop("items")]}
        of_list = {"type": replicas.pop("type"), "items": items}
        replicas["anyOf"] = [{"type": "string"}, of_list]
    models = made["$defs"]["RouteSettings"]["properties"]["models"]["additionalProperties"]
    models["oneOf"].append({"type": "string"})
    return {"$schema": Draft202012Validator.META_SCHEMA["$id"], **made}


def text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def test_schema_is_current() -> None:
    again = "run: python -m tests.config.test_schema"
    assert SCHEMA.read_text(encoding="utf-8") == text(), again


def examples() -> list[Any]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [
        yaml.safe_load(block)
        for page in pages
        for block in re.findall(
            r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
        )
        if "{{" not in block
    ]
    known = Config.model_fields.keys()
    return [block for block in blocks if isinstance(block, dict) and block.keys() <= known]


def test_documented_configurations_keep_the_schema() -> None:
    validator, found = Draft202012Validator(schema()), examples()
    assert len(found) > 3
    for example in found:
        assert not [error.message for error in validator.iter_errors(example)], example


@pytest.mark.parametrize(
    "wrong", [{"rout": {}}, {"route": {"polcy": "random"}}, {"route": {"policy": "randm"}}]
)
def test_typo_breaks_the_schema(wrong: dict[str, Any]) -> None:
    assert [*Draft202012Validator(schema()).iter_errors(wrong)]


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")

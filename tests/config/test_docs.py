"""The documentation names every setting, with its default."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from extproc.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field.get_default(call_default_factory=True)


@pytest.mark.parametrize(("key", "default"), list(settings(Config)))
def test_every_setting_is_documented(key: str, default: object) -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{key}` |"))
    if default not in ((), None, {}):
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert f"| `{shown}` |" in row

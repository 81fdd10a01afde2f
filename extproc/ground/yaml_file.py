"""Reader of YAML files; its errors take one line and name the place of the mistake."""

from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # tag of the key `<<`, which a mapping may have several times


def read_yaml(path: Path) -> object:
    """Reads a file; raises OSError, or ValueError if it is not YAML in UTF-8."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: byte {error.start + 1} is not UTF-8") from None


def parse_yaml(text: str) -> object:
    """Parses YAML or JSON: returns a single document, or a list of several.

    Raises:
        ValueError: the text is not YAML. The message quotes no line: a line may hold a password.
    """
    try:
        documents = list(yaml.load_all(text, _Loader))
    except RecursionError:
        raise ValueError("not YAML: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"not YAML: {place}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    return documents[0] if len(documents) == 1 else documents or None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuses a key that occurs twice; PyYAML's loader would take the last value."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Mark] = {}
        keys = [
            key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE
        ]
        for key in keys:
            before = first.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is already there in line {before.line + 1}",
                    problem_mark=key.start_mark,
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Adds the place in the file to PyYAML's errors. ``deep=True`` makes PyYAML refuse a node
        that contains itself."""
        try:
            return super().construct_object(node, deep=True)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"not a valid {kind}", problem_mark=node.start_mark
            ) from None

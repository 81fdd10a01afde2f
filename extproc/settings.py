"""Fills :class:`extproc.config.Config` from a YAML file, the environment and flags.

Precedence, low to high: file, environment (``EXTPROC_POLL__INTERVAL_S``), flags
(``--poll.interval_s``). pydantic-settings is not used, because it neither reports unknown variables
with the prefix ``EXTPROC_`` nor names the source of a wrong value.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from extproc.config import REMOVED, Config, ReplicaSource
from extproc.ground.text import suggest
from extproc.ground.yaml_file import parse_yaml, read_yaml

ENV_PREFIX = "EXTPROC_"
ENV_FILE = "EXTPROC_CONFIG"  # variable that names the YAML file if no flag does

_SERVICE_LINK = re.compile(r"EXTPROC_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_.+)?)")
"""Variables that Kubernetes sets in every pod for a Service named ``extproc`` or ``extproc-…``."""

_IPV6 = re.compile(r"\[[^\[\]]*\]:")  # an address, which YAML would read as a list

_SHAPE_ERRORS = {
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "dict_type": "must hold keys and values",
    "model_type": "must hold keys and values",
}
"""Messages by pydantic's error type, in YAML's terms instead of Python's."""


class ConfigError(Exception):
    """The configuration cannot be used; ``args``: lines, each with a problem."""


_Given = Iterator[tuple[str, object, str]]  # key, value, and file, variable or flag that set it


def load(flags: Mapping[str, str], env: Mapping[str, str], file: Path | None = None) -> Config:
    """Merges flags (key → text), the environment (empty variables are unset) and a file; raises
    ConfigError for unknown keys, wrong values and an unreadable file."""
    problems, values, origins = list[str](), dict[str, object](), dict[str, str]()
    from_flags = ((key, _parsed(key, text, f"--{key}"), f"--{key}") for key, text in flags.items())
    for key, value, origin in chain(_from_file(file) if file else (), _from_env(env), from_flags):
        if key in LEAVES:
            values[key], origins[key] = value, origin
        else:
            problems.append(_unknown(origin, key))
    try:
        config = Config.model_validate(_nested(values))
    except ValidationError as error:
        problems += [_explain(detail, origins, file) for detail in error.errors()]
    if problems:
        raise ConfigError(*problems)
    return config


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


LEAVES: dict[str, FieldInfo] = dict(_leaves(Config))
"""All settings by key, such as ``poll.interval_s``, with their descriptions and defaults."""

_TEXTS = {key for key, field in LEAVES.items() if field.annotation in (str, str | None)}

_SECTIONS = {key.rpartition(".")[0] for key in LEAVES} - {""}


def _from_file(path: Path) -> _Given:
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values, not a {type(content).__name__}")
    for key, value in _flat(content):
        yield key, value, str(path)


def _flat(content: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS and value is None:
            continue  # a section whose keys are all commented out
        if isinstance(value, dict) and key not in LEAVES:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _from_env(env: Mapping[str, str]) -> _Given:
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name == ENV_FILE or not text:
            continue
        key = name.removeprefix(ENV_PREFIX).replace("__", ".").lower()
        if key in LEAVES or not _SERVICE_LINK.fullmatch(name):
            origin = f"variable {name}"
            yield key, _parsed(key, text, origin), origin


def _parsed(key: str, text: str, origin: str) -> object:
    """Reads lists and mappings in the flow style of YAML (or JSON); other text stays as it is, and
    so does the value of a setting that is text, such as a password."""
    if key in _TEXTS or text[:1] not in ("[", "{") or _IPV6.match(text):
        return text
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{_place(origin, key)}: {error}") from None


def _place(origin: str, key: str) -> str:
    """Source and key of a value, for messages; the name of a flag shows both."""
    return origin if origin == f"--{key}" else f"{origin}: {key}"


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _unknown(origin: str, key: str) -> str:
    if key in REMOVED:
        return f"{origin}: {key!r} was removed: {REMOVED[key]}"
    if key in _SECTIONS:
        first = next(leaf for leaf in LEAVES if leaf.startswith(f"{key}."))
        return f"{origin}: {key!r} is a section: set its keys, for example {first!r}"
    return f"{origin}: unknown key {key!r}{suggest(key, [*LEAVES, *sorted(_SECTIONS)])}"


def _explain(detail: ErrorDetails, origins: Mapping[str, str], file: Path | None) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    key = next((key for key in origins if where == key or where.startswith(f"{key}.")), None)
    origin = origins[key] if key else str(file or "configuration")
    if detail["type"] == "extra_forbidden":
        name = where.rpartition(".")[2]
        return f"{origin}: unknown key {where!r}{suggest(name, ReplicaSource.model_fields)}"
    message = detail["msg"].removeprefix("Value error, ")
    if not where:  # an error of several keys: the message names them
        return f"{origin}: {message}"
    wanted = _SHAPE_ERRORS.get(detail["type"], message[:1].lower() + message[1:])
    secret = where in _SECTIONS or (where in LEAVES and not LEAVES[where].repr)
    if not secret:
        wanted += f"; given: {detail['input']!r}"
    if detail["type"] == "literal_error":
        wanted += suggest(str(detail["input"]), re.findall("'([^']+)'", message))
    return f"{_place(origin, where)}: {wanted}"

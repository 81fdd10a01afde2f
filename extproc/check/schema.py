"""Envoy's own schema, from ``envoy-data-plane``: names misspelt fields and values of no use.

The package's own errors name no place in the file, and it knows a type only once its module is
imported. So the tree is walked here, field by field, beside its description of each message.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from betterproto2 import Message
from betterproto2.casing import safe_snake_case
from pydantic import ValidationError

from extproc.check.finding import Finding, Level
from extproc.check.tree import Node, Path, written
from extproc.nearest import nearest

_PACKAGE = "envoy_data_plane"


def message_type(name: str) -> type[Message] | None:
    """The class of ``envoy.config.cluster.v3.Cluster``; None where Envoy has no such type."""
    package, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{_PACKAGE}.{package}"), short, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, Message) else None


def problems(node: Node) -> Iterator[Finding]:
    """Where and why a node and all it holds do not meet the schema.

    A type that it does not hold is a warning: other builds of Envoy have types of their own.
    """
    cls = message_type(node.type)
    if cls is None:
        yield _unknown_type(node.type, node.path)
    else:
        yield from _message(cls, node.fields, node.path)


def _message(cls: type[Any], value: object, path: Path) -> Iterator[Finding]:
    if is_any(cls):
        yield from _any(value, path)
    elif is_plain(cls):
        yield from _leaf(cls, value, path)
    elif not isinstance(value, Mapping):
        yield _problem(path, f"must hold the fields of {cls.__name__}, not {value!r}")
    else:
        for key, item in value.items():
            yield from _field(cls, str(key), item, (*path, str(key)))


def _field(cls: type[Any], key: str, value: object, path: Path) -> Iterator[Finding]:
    description = cls._betterproto
    name = field_name(cls, key)
    if name is None:
        known = description.meta_by_field_name
        yield _problem(path, f"{cls.__name__} has no field {key!r}{nearest(key, known)}")
        return
    meta = description.meta_by_field_name[name]
    wanted: type[Any] = object
    if meta.map_meta and meta.map_meta[1].proto_type == "message":
        inner, wanted = description.cls_by_field[f"{name}.value"], Mapping
    elif meta.proto_type == "message":
        inner = meta.unwrap() if meta.unwrap else description.cls_by_field[name]
        wanted = list if meta.repeated else object
    else:
        yield from _leaf(cls, {name: value}, path)
        return
    if value is not None and not isinstance(value, wanted):
        kind = "a list" if wanted is list else "keys and values"
        yield _problem(path, f"must hold {kind}, not {value!r}")
        return
    for item, place in _items(value, wanted, path):
        if item is not None:
            yield from _message(inner, item, place)
        elif wanted is not object:
            yield _problem(place, "must not be null")


def _items(value: Any, container: type[Any], path: Path) -> list[tuple[object, Path]]:
    if value is None or container is object:
        return [(value, path)]
    pairs = enumerate(value) if container is list else value.items()
    return [(item, (*path, at)) for at, item in pairs]


def field_name(cls: type[Any], key: str) -> str | None:
    """A field's name, of it or of its JSON form; None where the message has no such field."""
    names = cls._betterproto.meta_by_field_name
    if (name := safe_snake_case(key)) in names:
        return name
    # Its idea of snake case takes consecutive_5xx apart.
    return next((name for name in names if key in (name, _json_name(name))), None)


def _json_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _any(value: object, path: Path) -> Iterator[Finding]:
    if value == {}:
        return  # as in FilterConfig, which may leave its filter's own settings as they are
    if not isinstance(value, Mapping) or not isinstance(value.get("@type"), str):
        yield _problem(path, "needs an '@type'")
        return
    name = str(value["@type"]).rpartition("/")[2]
    cls = message_type(name)
    if cls is None:
        yield _unknown_type(name, path)
        return
    fields = {key: item for key, item in value.items() if key != "@type"}
    yield from _message(
        cls, fields["value"] if is_plain(cls) and "value" in fields else fields, path
    )


def _leaf(cls: type[Message], value: object, path: Path) -> Iterator[Finding]:
    try:
        cls.from_dict(value)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        yield _problem(path, _reason(error))


def _problem(path: Path, text: str) -> Finding:
    return Finding("schema", Level.ERROR, written(path), text)


def _unknown_type(name: str, path: Path) -> Finding:
    text = f"Envoy itself has no type {name!r}: misspelt, or another build's own; not checked"
    return Finding("schema", Level.WARNING, written(path), text)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(detail["msg"] for detail in error.errors())
    return str(error)


def is_any(cls: type[Message]) -> bool:
    """Whether it holds a message of any type."""
    return (cls.__module__, cls.__name__) == (f"{_PACKAGE}.google.protobuf", "Any")


def is_plain(cls: type[Message]) -> bool:
    """Durations, wrappers and the like, which JSON writes as a value."""
    return cls.to_dict is not Message.to_dict

"""Envoy's own schema, as ``envoy-data-plane`` describes it."""

import importlib
from typing import Any

from betterproto2 import Message
from betterproto2.casing import safe_snake_case

_PACKAGE = "envoy_data_plane"


def message_type(name: str) -> type[Message] | None:
    """The class of ``envoy.config.cluster.v3.Cluster``; None where Envoy has no such type."""
    package, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{_PACKAGE}.{package}"), short, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, Message) else None


def field_names(cls: type[Any]) -> list[str]:
    """Of all its fields."""
    return [*cls._betterproto.meta_by_field_name]


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


def held_by(cls: type[Any], name: str) -> tuple[type[Any] | None, type[Any]]:
    """The class of the messages that a field holds, and in what: a list, a dict or nothing
    (``object``); None where it holds plain values."""
    description = cls._betterproto
    meta = description.meta_by_field_name[name]
    if meta.map_meta and meta.map_meta[1].proto_type == "message":
        return description.cls_by_field[f"{name}.value"], dict
    if meta.proto_type != "message":
        return None, object
    inner = meta.unwrap() if meta.unwrap else description.cls_by_field[name]
    return inner, list if meta.repeated else object


def is_plain(cls: type[Message]) -> bool:
    """Durations, wrappers and the like, which JSON writes as a value."""
    return cls.to_dict is not Message.to_dict

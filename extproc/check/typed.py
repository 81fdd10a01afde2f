"""A YAML tree as one typed message: to be looked into, or with all that it holds as ``Any``.

The package's own ``from_dict`` knows a type only once its module is imported, and no field with a
letter after a digit (``consecutive_5xx``).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from betterproto2 import Message
from envoy_data_plane.google.protobuf import Any as AnyMessage

from extproc.check.schema import field_name, is_any, is_plain, message_type

M = TypeVar("M", bound=Message)


def typed(cls: type[M], fields: Mapping[str, Any], packed: bool = True) -> M:
    """The message of these fields, which must meet the schema (``extproc.check.schema``).

    Args:
        cls: the message's class.
        fields: what it holds.
        packed: with what it holds as ``Any``; without, those are there by their type alone.

    Raises:
        ValueError: it has no such field, a value is of no use there, or it holds a type that
            the package has not.
    """
    description: Any = cls._betterproto  # type: ignore[arg-type]
    plain: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for key, value in fields.items():
        name = field_name(cls, key)
        if name is None:
            raise ValueError(f"{cls.__name__} has no field {key!r}")
        meta = description.meta_by_field_name[name]
        if value is None:
            continue
        if meta.map_meta and meta.map_meta[1].proto_type == "message":
            inner = description.cls_by_field[f"{name}.value"]
            parts[name] = {key: _message(inner, item, packed) for key, item in value.items()}
        elif meta.proto_type == "message":
            inner = meta.unwrap() if meta.unwrap else description.cls_by_field[name]
            items = value if meta.repeated else [value]
            made = [_message(inner, item, packed) for item in items]
            parts[name] = made if meta.repeated else made[0]
        else:
            plain[name] = value
    message = cls.from_dict(plain)
    for name, part in parts.items():
        setattr(message, name, part)
    return message


def _message(cls: type[Any], value: Any, packed: bool) -> Any:
    if is_any(cls):
        return _any(value) if packed else AnyMessage(type_url=str(value.get("@type", "")))
    if not is_plain(cls):
        return typed(cls, value, packed)
    message = cls.from_dict(value)
    return message.to_wrapped() if hasattr(message, "to_wrapped") else message


def _any(value: Mapping[str, Any]) -> AnyMessage:
    url = str(value.get("@type", ""))
    if not value:
        return AnyMessage()
    cls = message_type(url.rpartition("/")[2])
    if cls is None:
        raise ValueError(f"{url!r} is no type of Envoy's own, and cannot be served")
    fields = {key: item for key, item in value.items() if key != "@type"}
    held = fields.get("value", fields) if is_plain(cls) else fields
    inner = _message(cls, held, packed=True)
    return AnyMessage(type_url=url, value=bytes(inner))

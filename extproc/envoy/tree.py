"""An Envoy file as a tree of plain values, and the places at which the file breaks Envoy's schema.

The type of a message follows from its ``@type``, from its key (``clusters``, ``listeners``, …) or,
in Istio's EnvoyFilter, from the ``applyTo`` of its patch. The schema is that of
``envoy-data-plane``, whose ``from_dict`` does not suffice: errors name no place in the file, types
of modules that are not imported are unknown, and so are fields such as ``consecutive_5xx``.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import Any

from betterproto2 import Message
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.google.protobuf import Duration, Struct
from envoy_data_plane.message_pool import default_message_pool
from pydantic import ValidationError

from extproc.envoy.finding import Finding, Level
from extproc.ground.text import suggest

_PACKAGE = "envoy_data_plane."
BOOTSTRAP = "envoy.config.bootstrap.v3.Bootstrap"
CLUSTER = "envoy.config.cluster.v3.Cluster"
LISTENER = "envoy.config.listener.v3.Listener"
ROUTE = "envoy.config.route.v3.RouteAction"
ROUTE_ENTRY = "envoy.config.route.v3.Route"
VIRTUAL_HOST = "envoy.config.route.v3.VirtualHost"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
FILTER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpFilter"
_BY_KEY = {
    "clusters": CLUSTER,
    "listener": LISTENER,
    "listeners": LISTENER,
    "route": ROUTE,
    "routes": ROUTE_ENTRY,
    "http_connection_manager": MANAGER,
    "http_filters": FILTER,
}
_BY_APPLY_TO = {
    "CLUSTER": CLUSTER,
    "LISTENER": LISTENER,
    "HTTP_FILTER": FILTER,
    "HTTP_ROUTE": ROUTE_ENTRY,
    "VIRTUAL_HOST": VIRTUAL_HOST,
    "NETWORK_FILTER": "envoy.config.listener.v3.Filter",
}
_DUMP = "type.googleapis.com/envoy.admin."  # type of a part of a running Envoy's dump
_SKIPPED = {
    *("draining_state", "warming_state", "dynamic_warming_clusters"),  # not in force
    "static_route_configs",  # also in the listeners
}
"""Keys in dumps whose values are not read."""
_TYPED_STRUCT = re.compile(r"(udpa\.type\.v1|xds\.type\.v3)\.TypedStruct$")

Path = tuple[str | int, ...]  # keys and indices that lead to a place in the tree


class Node(dict[str, Any]):
    """A message as a dict of its fields by ``snake_case`` name.

    Enums are given as names, durations as ``timedelta``. A missing field reads as its default in
    proto3, a missing message as an empty node.
    """

    def __init__(self, cls: type[Any], path: Path, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(fields or {})
        self.cls = cls
        self.path = path

    def __missing__(self, name: str) -> Any:
        inner, container = _field_type(self.cls, name)
        if inner is not None and container is object and not _is_plain(inner):
            return Node(inner, (*self.path, name))
        return _enum_names(getattr(self.cls(), name))

    @property
    def kind(self) -> str:
        """Name of the message's type, as in ``@type``."""
        return f"{self.cls.__module__}.{self.cls.__name__}".removeprefix(_PACKAGE)

    @property
    def where(self) -> str:
        """Path as text, such as ``static_resources.listeners[0].name``."""
        return _written(self.path)


class Tree:
    """Envoy's messages in a bootstrap, a fragment of a bootstrap, or a patch for a mesh; of a
    running Envoy's dump, the messages that are in force."""

    def __init__(self, tree: object) -> None:
        self.findings: list[Finding] = []  # breaches of the schema, and unknown types
        self.refused: list[Finding] = []  # updates that the running Envoy refused
        self._nodes: list[Node] = []
        self._search(tree, (), None, kubernetes=False)

    def __bool__(self) -> bool:
        return bool(self._nodes or self.findings)

    def all(self, kind: str, within: Node | None = None) -> list[Node]:
        """Return the messages of a type, in the whole file or within a message."""
        root = within.path if within is not None else ()
        return [
            node for node in self._nodes if node.kind == kind and node.path[: len(root)] == root
        ]

    def _search(self, value: object, path: Path, kind: str | None, kubernetes: bool) -> None:
        match value:
            case list():
                for index, item in enumerate(value):
                    self._search(item, (*path, index), kind, kubernetes)
            case {"@type": str(), "bootstrap": _}:
                # Part of a dump, whose other parts have the resources of the bootstrap.
                self._read(_message_type(BOOTSTRAP), {}, path)
            case {"@type": str(name)} if not name.startswith(_DUMP):
                self._read_any(value, path)
            case {"static_resources": _} | {"staticResources": _}:
                self._read(_message_type(BOOTSTRAP), value, path)
            case Mapping() if kind:
                self._read(_message_type(kind), value, path)
            case {"applyTo": target, "patch": Mapping() as patch}:
                kind = _BY_APPLY_TO.get(str(target))
                self._search(patch.get("value"), (*path, "patch", "value"), kind, kubernetes)
            case {"failed_configuration": _, "details": reason} | {
                "failedConfiguration": _,
                "details": reason,
            }:
                text = f"Envoy refused an update and keeps its old configuration: {reason}"
                self.refused.append(Finding("envoy", Level.ERROR, _written(path), text))
            case Mapping():
                # Resources of Kubernetes use the same keys for other things.
                kubernetes = kubernetes or {"apiVersion", "kind"} <= value.keys()
                for key, child in value.items():
                    name = snake_case(str(key))
                    kind = None if kubernetes else _BY_KEY.get(name)
                    if name not in _SKIPPED:
                        self._search(child, (*path, str(key)), kind, kubernetes)

    def _read(self, cls: Any, value: object, path: Path) -> Any:
        """Return a node, or the value of a duration or wrapper; None for a breach of the schema."""
        if cls is AnyMessage:
            return self._read_any(value, path)
        if cls is Duration and not isinstance(value, str):
            return self._report(path, f"must be a duration, such as 1s, not {value!r}")
        if cls is Struct and not isinstance(value, Mapping):
            return self._report(path, f"must hold keys and values, not {value!r}")
        if _is_plain(cls):
            return self._convert(lambda: _unwrapped(cls.from_dict(value)), path)
        if not isinstance(value, Mapping):
            return self._report(path, f"must hold the fields of {cls.__name__}, not {value!r}")
        node = Node(cls, path)
        self._nodes.append(node)
        for key, item in value.items():
            place = (*path, str(key))
            name = _fields(cls).get(str(key))
            if name is None:
                hint = suggest(str(key), cls._betterproto.meta_by_field_name)
                text = f"{cls.__name__} has no field {str(key)!r}: it is misspelt, or belongs to a "
                self._report(place, f"{text}newer Envoy; not checked{hint}", Level.WARNING)
            elif (
                item is not None and (made := self._read_field(cls, name, item, place)) is not None
            ):
                node[name] = made
        for group, fields in cls._betterproto.oneof_field_by_group.items():
            given = sorted(field.name for field in fields if field.name in node)
            if len(given) > 1:
                self._report(path, f"{group} has more than one value: {', '.join(given)}")
        return node

    def _read_field(self, cls: Any, name: str, value: Any, path: Path) -> Any:
        inner, container = _field_type(cls, name)
        if inner is None:
            return self._convert(
                lambda: _enum_names(getattr(cls.from_dict({name: value}), name)), path
            )
        if not isinstance(value, container):
            kind = "a list" if container is list else "keys and values"
            return self._report(path, f"must hold {kind}, not {value!r}")
        if container is dict:
            return {key: self._read_item(inner, item, (*path, key)) for key, item in value.items()}
        if container is list:
            return [self._read_item(inner, item, (*path, at)) for at, item in enumerate(value)]
        return self._read(inner, value, path)

    def _read_item(self, cls: Any, value: object, path: Path) -> Any:
        if value is None:
            self._report(path, "must not be null")
        made = None if value is None else self._read(cls, value, path)
        return Node(cls, path) if made is None else made

    def _read_any(self, value: object, path: Path) -> Any:
        if value == {}:
            # An empty ``config`` of a FilterConfig leaves the filter's settings as they are.
            return Node(AnyMessage, path)
        if not isinstance(value, Mapping) or not isinstance(value.get("@type"), str):
            return self._report(path, "needs an '@type'")
        name = str(value["@type"]).rpartition("/")[2]
        fields: Any = {key: item for key, item in value.items() if key != "@type"}
        inner = fields.get("value")
        if _TYPED_STRUCT.search(name) and isinstance(inner, Mapping):
            self._read_any(
                {**inner, "@type": fields.get("type_url") or fields.get("typeUrl")}, path
            )
        cls = _message_type(name)
        if cls is None:  # only a warning: other builds of Envoy have more types
            text = f"Envoy has no type {name!r}: it is misspelt, or belongs to another build"
            self._report(path, f"{text}; not checked", Level.WARNING)
            return Node(AnyMessage, path)
        return self._read(cls, inner if _is_plain(cls) and "value" in fields else fields, path)

    def _convert(self, make: Callable[[], Any], path: Path) -> Any:
        try:
            return make()
        except ValidationError as error:
            messages = (detail["msg"].removeprefix("Value error, ") for detail in error.errors())
            return self._report(path, "; ".join(messages))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return self._report(path, str(error))

    def _report(self, path: Path, text: str, level: Level = Level.ERROR) -> None:
        self.findings.append(Finding("schema", level, _written(path), text))


def snake_case(key: str) -> str:
    """Turn ``camelCase``, which JSON may use, into ``snake_case``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()


def _written(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _message_type(name: str) -> Any:
    """Return the class of a type such as ``envoy.config.cluster.v3.Cluster``; None if unknown."""
    with suppress(ImportError):  # a module registers its classes under the names of their types
        importlib.import_module(_PACKAGE + name.rpartition(".")[0])
    return default_message_pool.url_to_type.get(f"type.googleapis.com/{name}")


@cache
def _fields(cls: Any) -> dict[str, str]:
    """Map each name of a field, ``snake_case`` or ``camelCase``, to the name in ``snake_case``."""
    names = cls._betterproto.meta_by_field_name
    camel = {re.sub("_(.?)", lambda found: found[1].upper(), name): name for name in names}
    return camel | {name: name for name in names}


def _field_type(cls: Any, name: str) -> tuple[Any, type[Any]]:
    """Return the class of a field's messages (None: plain values), and the field's container:
    ``list``, ``dict`` or ``object``."""
    description = cls._betterproto
    meta = description.meta_by_field_name[name]
    if meta.map_meta and meta.map_meta[1].proto_type == "message":
        return description.cls_by_field[f"{name}.value"], dict
    if meta.proto_type != "message":
        return None, object
    inner = meta.unwrap() if meta.unwrap else description.cls_by_field[name]
    return inner, list if meta.repeated else object


def _is_plain(cls: Any) -> bool:
    """Return true for durations, wrappers and other messages that JSON writes as a plain value."""
    return cls.to_dict is not Message.to_dict


def _unwrapped(message: Any) -> Any:
    return message.to_wrapped() if hasattr(message, "to_wrapped") else message


def _enum_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_enum_names(item) for item in value]
    if not isinstance(value, Enum):
        return value
    if not value.name:
        raise ValueError(f"{value.value} is not a value of this enum")
    return value.name

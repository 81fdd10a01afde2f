"""Envoy's messages in a YAML or JSON tree, whatever they are wrapped in, read against the schema.

A message is known by its ``@type``, by the key it lies under (``clusters``, ``listeners``, …), or,
in Istio's EnvoyFilter, by the ``applyTo`` of its patch. It is read field by field here, because the
package's own ``from_dict`` names no place in the file, knows a type only once its module is
imported, and no field with a letter after a digit (``consecutive_5xx``).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from betterproto2 import Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.listener.v3 import Filter, Listener
from envoy_data_plane.envoy.config.route.v3 import Route, RouteAction, VirtualHost
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)
from envoy_data_plane.google.protobuf import Any as AnyMessage
from pydantic import ValidationError

from extproc.envoy.finding import Finding, Level
from extproc.envoy.schema import field_name, field_names, held_by, is_plain, message_type
from extproc.ground.text import suggest

_BY_KEY: dict[str, type[Message]] = {
    "clusters": Cluster,
    "listener": Listener,
    "listeners": Listener,
    "route": RouteAction,
    "http_connection_manager": HttpConnectionManager,
    "http_filters": HttpFilter,
}
_BY_APPLY_TO: dict[str, type[Message]] = {
    "CLUSTER": Cluster,
    "LISTENER": Listener,
    "HTTP_FILTER": HttpFilter,
    "HTTP_ROUTE": Route,
    "VIRTUAL_HOST": VirtualHost,
    "NETWORK_FILTER": Filter,
}
_TYPED_STRUCT = re.compile(r"(udpa\.type\.v1|xds\.type\.v3)\.TypedStruct$")

Path = tuple[str | int, ...]
"""Keys and indices that lead to a place in the tree."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A typed message and where it stands in the file."""

    path: Path
    message: T

    @property
    def where(self) -> str:
        """The path as people write it."""
        return written(self.path)


class Parts:
    """The messages in a bootstrap, in a fragment of one, or in a patch for a mesh.

    ``kind`` is what the tree is, or each in a list of them, where it does not say so itself.
    """

    def __init__(self, tree: object, kind: type[Message] | None = None) -> None:
        self.findings: list[Finding] = []
        """What does not meet the schema, and types that Envoy itself does not have."""
        self._parts: list[Part[Any]] = []
        self._search(tree, (), kind, kubernetes=False)

    def __bool__(self) -> bool:
        """Whether there is anything of Envoy's in it."""
        return bool(self._parts or self.findings)

    def has(self, cls: type[Any]) -> bool:
        """Whether there is a message of that type."""
        return any(type(part.message) is cls for part in self._parts)

    def all(self, cls: type[M], within: Part[Any] | None = None) -> list[Part[M]]:
        """Every message of that type, in the whole file or within one part of it."""
        root = within.path if within else ()
        return [
            part
            for part in self._parts
            if type(part.message) is cls and part.path[: len(root)] == root
        ]

    def _search(
        self, value: object, path: Path, kind: type[Message] | None, kubernetes: bool
    ) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                self._search(item, (*path, index), kind, kubernetes)
        if not isinstance(value, Mapping):
            return
        if isinstance(value.get("@type"), str):
            self._any(value, path)
        elif "static_resources" in value or "staticResources" in value:
            self._read(Bootstrap, value, path)
        elif kind:
            self._read(kind, value, path)
        elif "applyTo" in value and isinstance(patch := value.get("patch"), Mapping):
            kind = _BY_APPLY_TO.get(str(value["applyTo"]))
            self._search(patch.get("value"), (*path, "patch", "value"), kind, kubernetes)
        else:
            # Kubernetes has things of its own under the same keys.
            kubernetes = kubernetes or {"apiVersion", "kind"} <= value.keys()
            for key, child in value.items():
                kind = None if kubernetes else _BY_KEY.get(snake(str(key)))
                self._search(child, (*path, str(key)), kind, kubernetes)

    def _read(self, cls: type[Any], value: object, path: Path) -> Any:
        """The message that is written there; None where it cannot be made."""
        if cls is AnyMessage:
            return self._any(value, path)
        if is_plain(cls):
            plain: Any = self._made(lambda: cls.from_dict(value), path)
            return plain.to_wrapped() if hasattr(plain, "to_wrapped") else plain
        if not isinstance(value, Mapping):
            return self._problem(path, f"must hold the fields of {cls.__name__}, not {value!r}")
        fields: dict[str, Any] = {}
        for key, item in value.items():
            place = (*path, str(key))
            name = field_name(cls, str(key))
            if name is None:
                hint = suggest(str(key), field_names(cls))
                self._problem(place, f"{cls.__name__} has no field {str(key)!r}{hint}")
            elif item is not None and (made := self._field(cls, name, item, place)) is not None:
                fields[name] = made
        message = self._made(lambda: cls(**fields), path)
        if message is not None:
            self._parts.append(Part(path, message))
        return message

    def _field(self, cls: type[Any], name: str, value: Any, path: Path) -> Any:
        inner, container = held_by(cls, name)
        if inner is None:
            message = self._made(lambda: cls.from_dict({name: value}), path)
            return None if message is None else getattr(message, name)
        if not isinstance(value, container):
            kind = "a list" if container is list else "keys and values"
            return self._problem(path, f"must hold {kind}, not {value!r}")
        if container is dict:
            return {key: self._item(inner, item, (*path, key)) for key, item in value.items()}
        if container is list:
            return [self._item(inner, item, (*path, at)) for at, item in enumerate(value)]
        return self._read(inner, value, path)

    def _item(self, cls: type[Any], value: object, path: Path) -> Any:
        if value is None:
            self._problem(path, "must not be null")
        made = None if value is None else self._read(cls, value, path)
        return cls() if made is None else made  # what is wrong with it is noted

    def _any(self, value: object, path: Path) -> Any:
        if value == {}:
            # as in FilterConfig, which may leave its filter's own settings as they are
            return AnyMessage()
        if not isinstance(value, Mapping) or not isinstance(value.get("@type"), str):
            return self._problem(path, "needs an '@type'")
        url = str(value["@type"])
        fields: Any = {key: item for key, item in value.items() if key != "@type"}
        inner = fields.get("value")
        if _TYPED_STRUCT.search(url) and isinstance(inner, Mapping):
            self._any({**inner, "@type": fields.get("type_url") or fields.get("typeUrl")}, path)
        cls = message_type(url.rpartition("/")[2])
        if cls is None:
            self._unknown_type(url.rpartition("/")[2], path)
            return AnyMessage(type_url=url)
        message = self._read(cls, inner if is_plain(cls) and "value" in fields else fields, path)
        return AnyMessage(type_url=url, value=b"" if message is None else bytes(message))

    def _made(self, make: Callable[[], T], path: Path) -> Any:
        try:
            return make()
        except ValidationError as error:
            said = (detail["msg"].removeprefix("Value error, ") for detail in error.errors())
            return self._problem(path, "; ".join(said))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return self._problem(path, str(error))

    def _problem(self, path: Path, text: str) -> Any:
        """None, in place of what cannot be made."""
        self.findings.append(Finding("schema", Level.ERROR, written(path), text))

    def _unknown_type(self, name: str, path: Path) -> None:
        """A warning: other builds of Envoy have types of their own."""
        text = f"Envoy itself has no type {name!r}: misspelt, or another build's own; not checked"
        self.findings.append(Finding("schema", Level.WARNING, written(path), text))


def snake(key: str) -> str:
    """``camelCase``, as JSON may be written, to ``snake_case``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()


def written(path: Path) -> str:
    """``static_resources.listeners[0].name``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")

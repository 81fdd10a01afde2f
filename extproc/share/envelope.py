"""Envelopes: the form of all values in Redis, with a tag, a format version, and a body.

The version of a tag is the number of fields of its body. A field may be added at the end, with a
default: older readers skip the field, and count the fields by which the versions differ. If a field
changes its meaning or is removed, use a new tag: older readers skip and count the whole envelope.
"""

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args, get_origin

from msgspec import Raw, Struct, msgpack, structs

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Struct)  # type of a body


class Envelope(Struct, array_like=True, frozen=True):
    """Value in Redis of a key, hash field, list entry or stream entry; or part of a message."""

    tag: str
    version: int
    body: Raw  # MessagePack


class EnvelopeKind(Generic[B]):
    """Kind of envelope, identified by its tag, which is unique in the whole program.

    ``pack`` and ``unpack``: msgspec's hooks for fields of types that msgspec does not know.
    """

    def __init__(
        self,
        tag: str,
        body: type[B],
        pack: Callable[[Any], Any] | None = None,
        unpack: Callable[[type, Any], Any] | None = None,
    ) -> None:
        self.tag = tag
        self.version = _number_of_fields(body)
        self._encode = msgpack.Encoder(enc_hook=pack).encode
        self.decode = msgpack.Decoder(body, dec_hook=unpack).decode

    def seal(self, body: B) -> bytes:
        return msgpack.encode(Envelope(self.tag, self.version, Raw(self._encode(body))))


class Skips:
    """Opens envelopes, and counts the parts that this version of the program cannot read.

    ``count`` is called with a reason (``garbage``, ``unknown_tag`` or ``unknown_field``) and a
    number.
    """

    def __init__(self, count: Callable[[str, int], None] = lambda _reason, _number: None) -> None:
        self._count = count
        self._warned: set[str] = set()
        self._warned_of_version = False

    def open(self, source: str, data: Any, *kinds: EnvelopeKind[Any]) -> Any:
        """Returns the body of an envelope, or None if its kind is not in ``kinds`` or the envelope
        cannot be read.

        ``source``: the key or channel, for the log.
        """
        try:
            envelope = _DECODER.decode(data)
            kind = next((kind for kind in kinds if kind.tag == envelope.tag), None)
            if kind is None:
                self._skip("unknown_tag", 1)
                return None
            body = kind.decode(envelope.body)
            if envelope.version > kind.version:
                self._skip("unknown_field", envelope.version - kind.version)
        except (ValueError, TypeError, RecursionError) as error:
            self.garbage(source, error)
            return None
        return body

    def open_all(self, source: str, data: Any, *kinds: EnvelopeKind[Any]) -> list[Any]:
        try:
            envelopes = _LIST_DECODER.decode(data)
        except (ValueError, TypeError, RecursionError) as error:
            self.garbage(source, error)
            return []
        bodies = (self.open(source, envelope, *kinds) for envelope in envelopes)
        return [body for body in bodies if body is not None]

    def _skip(self, reason: str, number: int) -> None:
        self._count(reason, number)
        if not self._warned_of_version:
            self._warned_of_version = True
            log.info(
                "redis has values of another version: this version skips what it does not know"
            )

    def garbage(self, source: str, error: Exception) -> None:
        """Counts an unreadable value; logs the first of each source: writers repeat mistakes."""
        self._count("garbage", 1)
        if source not in self._warned:
            self._warned.add(source)
            log.warning("skipped garbage in redis", extra={"source": source, "error": str(error)})


def sealed_list(*envelopes: bytes) -> bytes:
    """Joins envelopes into a message that :meth:`Skips.open_all` opens."""
    return b"\xdc" + len(envelopes).to_bytes(2) + b"".join(envelopes)


def _number_of_fields(body: type) -> int:
    """Counts the fields of a type and of the types nested in it."""
    fields = structs.fields(body)
    nested = (_nested(field.type) for field in fields)
    return len(fields) + sum(_number_of_fields(type_) for type_ in nested if type_)


def _nested(type_: Any) -> type | None:
    """Returns S if the type of a field is a struct S or a tuple of S; otherwise None."""
    each = get_args(type_)[0] if get_origin(type_) is tuple else type_
    return each if isinstance(each, type) and issubclass(each, Struct) else None


_DECODER = msgpack.Decoder(Envelope)
_LIST_DECODER = msgpack.Decoder(list[Raw])

"""vLLM's events about its KV blocks (``vllm/distributed/kv_events.py``).

Depending on vLLM's version, an event is a map, or an array of its name and its fields.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, get_args

import msgspec

from extproc.fleet.held_blocks import LARGEST_BLOCK


class BlockStored(msgspec.Struct, tag=True):
    """The engine stored consecutive blocks of a sequence, which later prompts can hit."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(gt=0, le=LARGEST_BLOCK)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    # For each block, inputs of its hash beside tokens: the adapter's name, the salt, identifiers
    # and places of images, digests of embeddings.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """The engine evicted blocks."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The engine dropped all blocks."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_USUAL = msgspec.msgpack.Decoder(tuple[float, list[Event], int | None])
"""Fast path for vLLM 0.32, whose events are maps."""
_FIELDS: dict[Any, Any] = {
    kind.__name__: ("type", *kind.__struct_fields__) for kind in get_args(Event)
}


def read_batch(data: bytes) -> Iterable[Event]:
    """Reads the events of a batch, except unknown kinds; raises ValueError for any other data."""
    try:
        return _USUAL.decode(data)[1]
    except (ValueError, RecursionError):
        return _in_any_form(data)


def _in_any_form(data: bytes) -> Iterator[Event]:
    try:
        batch = msgspec.msgpack.decode(data)
        for event in batch["events"] if isinstance(batch, dict) else batch[1]:
            if not isinstance(event, dict):
                event = dict(zip(_FIELDS.get(event[0], ()), event, strict=False))
            if event.get("type") in _FIELDS:
                yield msgspec.convert(event, Event)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None

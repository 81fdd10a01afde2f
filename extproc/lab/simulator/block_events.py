"""What vLLM would tell of a replica's KV blocks (``vllm/distributed/kv_events.py``)."""

import asyncio
from collections.abc import Sequence as Items
from itertools import groupby
from typing import Any

from extproc.lab.simulator import tokens
from extproc.lab.simulator.sequence import Sequence

_MEDIUM = "GPU"


class BlockEvents:
    """Blocks stored and removed that nobody was told of yet, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[dict[str, Any]] = []
        self._some = asyncio.Event()

    def stored(self, sequence: Sequence, first: int, hashes: Items[int]) -> None:
        """Of the blocks of a sequence from ``first`` on, those with these hashes can be hit now."""
        new, end = set(hashes), sequence.hashes.index(hashes[-1]) + 1
        blocks = groupby(range(first, end), lambda block: sequence.hashes[block] in new)
        for is_new, run in blocks:
            if is_new:
                self._add(self._stored(sequence, [*run]))

    def removed(self, hash_: int) -> None:
        """A block was evicted."""
        self._add({"type": "BlockRemoved", "block_hashes": [hash_], "medium": _MEDIUM})

    async def take(self) -> list[dict[str, Any]]:
        """Wait for events, and take them."""
        await self._some.wait()
        self._some.clear()
        taken, self._events = self._events, []
        return taken

    def _stored(self, sequence: Sequence, blocks: list[int]) -> dict[str, Any]:
        first, last = blocks[0], blocks[-1]
        block_bytes = self._block_size * tokens.BYTES_PER_TOKEN
        content = sequence.content[first * block_bytes : (last + 1) * block_bytes]
        return {
            "type": "BlockStored",
            "block_hashes": [*sequence.hashes[first : last + 1]],
            "parent_block_hash": sequence.hashes[first - 1] if first else None,
            "token_ids": tokens.token_ids(content),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": sequence.adapter or None,
        }

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._some.set()

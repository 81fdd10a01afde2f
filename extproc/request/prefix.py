"""Keys of prompt prefixes: numbers that are equal for equal beginnings of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Ids = NDArray[np.uint32]  # token ids

UNIT_BYTES = 256  # of a prompt: some 64 tokens of text; smaller units need more memory
_MOST_UNITS = 4096
MOST_BYTES = _MOST_UNITS * UNIT_BYTES  # keys cover this much of a prompt: 262,000 tokens

_UNIT_WORDS = UNIT_BYTES // 4

_MOST_BLOCKS = 16_384  # of token ids: 262,000 tokens in blocks of 16
_FACTOR = 0x9E3779B97F4A7C15  # arbitrary odd number, like ``_MIX``
_MIX = np.array(0xD6E8FEB86659FD93, np.uint64)
_HALF = np.array(32, np.uint64)  # an array: numpy takes twice as long for a scalar
_POWERS = np.full(_MOST_BLOCKS, _FACTOR, np.uint64).cumprod()
_INVERSES = np.full(_MOST_BLOCKS, pow(_FACTOR, -1, 2**64), np.uint64).cumprod()

_NO_IDS = np.zeros(0, np.uint32)


@dataclass(slots=True, eq=False)  # not frozen: construction would take ten times as long
class Prefix:
    """Beginning of a prompt that a prefix cache may hold, as keys."""

    keys: Keys  # one for each whole unit, computed from the prompt up to the end of the unit
    unit: float  # tokens of the prompt in each unit
    tokens: float  # of the whole prompt, including the parts without keys
    whole: int = 0  # key of the whole prompt; 0: not known
    previous_key: int = 0
    """Key of the previous prompt: the part before the last answer; 0: no answer. The replica that
    gave this answer has the previous prompt and the answer in its cache."""
    previous_tokens: float = 0.0  # tokens up to the end of that answer
    ids: Ids = field(default_factory=lambda: _NO_IDS)  # of all tokens, if known
    salt: str = ""  # only prompts with the same salt share the cache


NO_PREFIX = Prefix(np.zeros(0, np.uint64), 1.0, 0.0)


def prefix_of(data: bytes, tokens: int, seed: int, before: int = 0, answer: int = 0) -> Prefix:
    """Return the prefix of a prompt.

    Args:
        data: the prompt.
        tokens: tokens in the whole prompt.
        seed: key before the first unit (:func:`seed_of`).
        before: bytes of the prompt up to the model's last answer.
        answer: bytes of that answer; 0: there is none.
    """
    if not data:
        return NO_PREFIX
    keys = unit_keys(data, seed)
    per_byte = tokens / len(data)
    return Prefix(
        keys,
        unit=UNIT_BYTES * per_byte,
        tokens=tokens,
        whole=_key_at(len(data), data, keys, seed),
        previous_key=_key_at(before, data, keys, seed) if answer else 0,
        previous_tokens=(before + answer) * per_byte if answer else 0.0,
    )


@lru_cache(maxsize=1024)
def seed_of(*names: str) -> int:
    """Return the number from which a prompt's first key is computed. ``names``: model and salt;
    prompts under different names share no key."""
    return _hash("\0".join(names).encode(errors="replace"))


def unit_keys(data: bytes, seed: int) -> Keys:
    """Return a key for each whole unit (``UNIT_BYTES``): a hash of all bytes up to its end."""
    units = min(len(data) // UNIT_BYTES, _MOST_UNITS)
    return token_keys(np.frombuffer(data, "<u4", units * _UNIT_WORDS), _UNIT_WORDS, seed)


def token_keys(ids: Ids | Sequence[int], block_size: int, before: int) -> Keys:
    """Return the keys of whole blocks of token ids.

    ``key[i] = key[i - 1] * F + block[i]`` modulo 2⁶⁴, for a fixed odd F. The powers of F and of its
    inverse give all keys at once, in a tenth of the time of a cryptographic hash. If the keys of
    two prompts collide, the router only errs about which replicas have the prompts cached.

    Args:
        ids: token ids.
        block_size: ids in a block.
        before: key of the block before ``ids``; for the first block of a prompt, :func:`seed_of`.

    Raises:
        OverflowError, TypeError, ValueError: ``ids`` are no token ids.
    """
    blocks = min(len(ids) // block_size, _MOST_BLOCKS)
    tokens = np.asarray(ids[: blocks * block_size], np.uint32).reshape(blocks, block_size)
    each = tokens @ _token_factors(block_size)
    each ^= each >> _HALF  # these three lines spread each bit over the number
    each *= _MIX
    each ^= each >> _HALF
    keys: Keys = (each * _INVERSES[:blocks]).cumsum()
    keys += np.uint64(before)
    keys *= _POWERS[:blocks]
    return keys


@lru_cache(maxsize=8)
def _token_factors(block_size: int) -> Keys:
    generator = np.random.Generator(np.random.PCG64(1))
    return generator.integers(0, 2**63, block_size, np.uint64) * 2 + 1


def _key_at(end: int, data: bytes, keys: Keys, seed: int) -> int:
    """Return the key of all bytes before ``end``, or 0 if ``end`` is above ``MOST_BYTES``."""
    if end > MOST_BYTES:
        return 0
    units = end // UNIT_BYTES
    last = int(keys[units - 1]) if units else seed
    return _hash(last.to_bytes(8, "little") + data[units * UNIT_BYTES : end])


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

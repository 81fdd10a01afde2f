"""Simulated tokenizer and vocabulary: a token is four bytes of UTF-8, padded at a text's end.

Encoded tokens stay bytes, so that their blocks can be hashed without a list of ids. Generated
tokens are words of three letters and a space. So their text encodes to the same tokens again, and
the next turn of a conversation hits the blocks of the last answer in the prefix cache.
"""

import json
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

BYTES_PER_TOKEN = 4

IMAGE_TOKENS = 576  # of a 336 × 336 picture in patches of 14 × 14, as in LLaVA 1.5

_NOUNS = (
    "air ant ash bay bee box cat cod cup day dog ear elk elm eye fox gem hat hen ice ink jar key"
)
_VERBS = (
    "add ask buy cut dig eat fit get hum jog let mix nod own pay run saw see set sip tap use win"
)

WORDS = tuple(f"{word} " for word in f"{_NOUNS} {_VERBS}".split())  # generated in this order


def encode(text: str) -> bytes:
    """Encode text as tokens."""
    data = text.encode("utf-8", "surrogatepass")
    return data + bytes(-len(data) % BYTES_PER_TOKEN)


def encode_ids(ids: Iterable[int]) -> bytes:
    """Encode token ids, four bytes each."""
    return array("I", ids).tobytes()


def token_ids(tokens: bytes) -> list[int]:
    """Return the ids of encoded tokens."""
    return list(array("I", tokens))


def count(tokens: bytes) -> int:
    """Count encoded tokens."""
    return len(tokens) // BYTES_PER_TOKEN


def encode_content(content: Any) -> bytes:
    """Encode a message's content: a string, or a list of parts.

    Parts other than text and images, for example tool calls, are encoded as JSON.
    """
    if content is None or isinstance(content, str):
        return encode(content or "")
    if isinstance(content, list):
        return b"".join(encode_content(part) for part in content)
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return encode(content["text"])
        if "image" in str(content.get("type")):
            digest = blake2b(json.dumps(content).encode(), digest_size=32).digest()
            return digest * (IMAGE_TOKENS * BYTES_PER_TOKEN // len(digest))
    return encode(json.dumps(content))


def encode_turn(role: str, content: bytes) -> bytes:
    """Encode a message as a chat template frames it."""
    return encode(f"<|{role}|>") + content + encode("<|end|>")


def generated_text(start: int, tokens: int) -> str:
    """Return the text of ``tokens`` generated tokens, from the word ``start`` on."""
    return "".join(WORDS[at % len(WORDS)] for at in range(start, start + tokens))

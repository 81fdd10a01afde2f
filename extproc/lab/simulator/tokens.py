"""A stand-in for a tokenizer and a model's vocabulary: four bytes are a token.

Text is UTF-8, cut every four bytes, the last token padded. Encoded tokens are kept as bytes, four
for each, so that blocks of them can be hashed without a list of numbers in between. Generated
tokens are words of three letters and a space: their text encodes to the same tokens again, and the
next turn of a conversation finds the blocks of the last answer in the prefix cache.
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

WORDS = tuple(f"{word} " for word in f"{_NOUNS} {_VERBS}".split())  # generated round and round


def encode(text: str) -> bytes:
    """The tokens of ``text``."""
    data = text.encode("utf-8", "surrogatepass")
    return data + bytes(-len(data) % BYTES_PER_TOKEN)


def encode_ids(ids: Iterable[int]) -> bytes:
    """Token ids of four bytes each, as given."""
    return array("I", ids).tobytes()


def token_ids(tokens: bytes) -> list[int]:
    """The ids of encoded tokens."""
    return list(array("I", tokens))


def count(tokens: bytes) -> int:
    """Number of encoded tokens."""
    return len(tokens) // BYTES_PER_TOKEN


def encode_content(content: Any) -> bytes:
    """The tokens of a message's content: a string, or parts with text, images and other things.

    Other parts, tool calls for example, count as their JSON.
    """
    if content is None or isinstance(content, str):
        return encode(content or "")
    if isinstance(content, list):
        return b"".join(encode_content(part) for part in content)
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return encode(content["text"])
        if "image" in str(content.get("type")):
            return _image(content)
    return encode(json.dumps(content))


def encode_turn(role: str, content: bytes) -> bytes:
    """A message as a chat template frames it."""
    return encode(f"<|{role}|>") + content + encode("<|end|>")


def generated_text(start: int, tokens: int) -> str:
    """The text of the first ``tokens`` generated tokens."""
    return "".join(WORDS[at % len(WORDS)] for at in range(start, start + tokens))


def _image(part: dict[str, Any]) -> bytes:
    digest = blake2b(json.dumps(part).encode(), digest_size=32).digest()
    return digest * (IMAGE_TOKENS * BYTES_PER_TOKEN // len(digest))

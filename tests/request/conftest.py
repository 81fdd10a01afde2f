"""Bodies of requests, and their profiles."""

import json
from pathlib import Path
from typing import Any

from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from extproc.request.tokens import TokenCounter


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def counter_of(
    bytes_per_token: float = 4.0, image_tokens: int = 576, **tokenizers: Path
) -> TokenCounter:
    return TokenCounter(bytes_per_token, image_tokens, tokenizers)


def profiled(tokens: TokenCounter, endpoint: Endpoint, **fields: Any) -> RequestProfile:
    return inspect(endpoint, json.dumps({"model": "m", **fields}).encode(), tokens)

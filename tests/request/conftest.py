"""Bodies of requests, and their profiles."""

import json
from typing import Any

from extproc.request.endpoint import Endpoint
from extproc.request.inspect import inspect
from extproc.request.profile import RequestProfile
from extproc.request.tokens import TokenCounter


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def profiled(tokens: TokenCounter, endpoint: Endpoint, **fields: Any) -> RequestProfile:
    return inspect(endpoint, json.dumps({"model": "m", **fields}).encode(), tokens)

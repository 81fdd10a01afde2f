"""What tells sessions apart: ids that clients send in a header or a cookie."""

from collections.abc import Mapping
from hashlib import blake2b


def session_of(headers: Mapping[str, str], header: str | None, cookie: str | None) -> str:
    """The id that a request has in that header or, where it is not there, in that cookie; empty:
    none."""
    named = headers.get(header.lower(), "") if header else ""
    if named or cookie is None:
        return named
    cookies = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == cookie), "")


def session_key(session: str, model: str) -> str:
    """Names a session among all: each of the models it uses has its replica.

    A digest, for an id may be a secret, and of any length; keys go through Redis.
    """
    return blake2b(f"{model}\n{session}".encode(), digest_size=16).hexdigest()

"""The API server of Kubernetes, as a program in a pod reaches it."""

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ValidationError

from extproc.ground.address import join_address

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet puts what a pod needs: it renews the token."""

MAX_BYTES = 8 * 2**20
"""Longest line that is read: one object, of which etcd takes 1.5 MiB."""

_CONNECT_S = 5.0


class ApiError(Exception):
    """The API server did not tell; the text says why, and what to do."""


class _Status(BaseModel):
    """What it tells with an error."""

    message: str = ""


def own_namespace() -> str:
    """The namespace of this pod."""
    return _of_account("namespace")


@asynccontextmanager
async def ask(
    path: str, query: Mapping[str, str], seconds: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Ask with GET, within so many seconds; the answer is one with status 200.

    Token and authority are read anew each time, so that renewed ones are used.
    """
    token = _of_account("token")
    async with aiohttp.ClientSession(
        f"https://{_address()}",
        connector=aiohttp.TCPConnector(ssl=_authority()),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_S),
        read_bufsize=MAX_BYTES,
    ) as session:
        try:
            async with session.get(path, params=query, allow_redirects=False) as response:
                if (status := response.status) != 200:
                    raise ApiError(_refusal(status, path, await response.read()))
                yield response
        except aiohttp.ClientError as error:
            raise ApiError(str(error)) from None
        except TimeoutError:
            raise ApiError(f"no answer within {seconds:g} s") from None


def _address() -> str:
    try:
        host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    except KeyError as error:
        raise ApiError(f"{error.args[0]} is not set, as it is in every pod: is this one?") from None
    return join_address(host, int(port))


def _authority() -> ssl.SSLContext:
    path = ACCOUNT / "ca.crt"
    try:
        context = ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise ApiError(f"{path} holds no certificate (PEM): {error}") from None
    except OSError as error:
        raise _missing(path, error) from None
    # The default since Python 3.13 refuses authorities that clusters have made for years.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _of_account(name: str) -> str:
    path = ACCOUNT / name
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise _missing(path, error) from None


def _missing(path: Path, error: OSError) -> ApiError:
    return ApiError(
        f"{path}: {error.strerror}: a pod has it that has a service account and does not set "
        "automountServiceAccountToken to false"
    )


def _refusal(status: int, path: str, body: bytes) -> str:
    try:
        told = _Status.model_validate_json(body).message
    except ValidationError:
        told = "no reason given"
    match status:
        case 401:
            return f"the token in {ACCOUNT / 'token'} is not accepted (401): {told}"
        case 403:
            kind = path.rpartition("/")[2]
            return (
                "the pod's service account needs a Role that allows the verbs list and watch on "
                f"{kind} (403): {told}"
            )
    return f"{path} answered {status}: {told}"

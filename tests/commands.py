"""A command in this process, beside a server that it asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from extproc.cli import main
from extproc.config import AdminSettings
from extproc.observe.admin import serve_admin
from extproc.proxy.admin import admin_routes
from extproc.proxy.services import Services
from tests.certificates import Authority


async def printed(
    capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> list[str]:
    """The lines that it prints, and it alone: on standard error where it fails."""
    assert await asyncio.to_thread(main, [*arguments]) == status
    output = capsys.readouterr()
    lines, silent = (output.err, output.out) if status else (output.out, output.err)
    assert silent == ""
    assert "\x1b" not in lines
    return lines.splitlines()


@asynccontextmanager
async def secured(
    services: Services, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Path]:
    """A router's admin address with TLS and a token, and the settings for it in the environment;
    yields a file that holds another token."""
    cert, key = Authority(folder / "authority").sign("router")
    token, other = folder / "token", folder / "other"
    token.write_text("an-example")
    other.write_text("another")
    access = AdminSettings(tls_cert=cert, tls_key=key, token_file=token)
    routes = admin_routes(services)
    async with serve_admin("127.0.0.1:0", CollectorRegistry(), routes, (), access) as address:
        for name in ("tls_cert", "tls_key", "token_file"):
            monkeypatch.setenv(f"EXTPROC_ADMIN__{name.upper()}", str(getattr(access, name)))
        monkeypatch.setenv("EXTPROC_SERVE__ADMIN", address)
        yield other

"""Admin address of a router, open or secured; a runner of commands; logged decisions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from extproc.cli import main
from extproc.config import AdminSettings
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.routes import page_routes
from extproc.observe.decision_log import LoggedDecision
from extproc.proxy.admin import admin_routes
from extproc.proxy.services import Services
from extproc.request.profile import RequestProfile
from tests.certificates import Authority
from tests.fakes import chat, decided

Run = Callable[..., Awaitable[list[str]]]
_OPEN = AdminSettings()
_ANY = "127.0.0.1:0"


def serving(
    services: Services, access: AdminSettings = _OPEN, address: str = _ANY
) -> AbstractAsyncContextManager[str]:
    return serve_admin(address, CollectorRegistry(), admin_routes(services), page_routes(), access)


@pytest.fixture
async def router(services: Services) -> AsyncIterator[str]:
    async with serving(services) as address:
        yield address


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
    async with serving(services, access) as address:
        for name in ("tls_cert", "tls_key", "token_file"):
            monkeypatch.setenv(f"EXTPROC_ADMIN__{name.upper()}", str(getattr(access, name)))
        monkeypatch.setenv("EXTPROC_SERVE__ADMIN", address)
        monkeypatch.setenv("EXTPROC_STATE", "memory")
        yield other


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    async def run(*arguments: str, status: int = 0) -> list[str]:
        assert await asyncio.to_thread(main, [*arguments]) == status
        output = capsys.readouterr()
        lines, silent = (output.err, output.out) if status else (output.out, output.err)
        assert silent == ""
        assert "\x1b" not in lines
        return lines.splitlines()

    return run


def decide(
    services: Services,
    profile: RequestProfile | None = None,
    request_id: str = "one",
    observed: bool = False,
) -> LoggedDecision:
    decision = decided(services.router, profile or chat(1000, 100))
    return services.log.add(request_id, services.wall(), decision, services.config.pool, observed)

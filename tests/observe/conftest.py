"""Admin address of a router; a runner of commands; logged decisions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import AdminSettings
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.routes import page_routes
from extproc.observe.decision_log import LoggedDecision
from extproc.proxy.admin import admin_routes
from extproc.proxy.services import Services
from extproc.request.profile import RequestProfile
from tests.conftest import Cli
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


@pytest.fixture
def run(cli: Cli) -> Run:
    async def run(*arguments: str, status: int = 0) -> list[str]:
        printed, errors = await asyncio.to_thread(cli, *arguments, status=status)
        lines, silent = (errors, printed) if status else (printed, errors)
        assert silent == []
        assert not any("\x1b" in line for line in lines)
        return lines

    return run


def decide(
    services: Services,
    profile: RequestProfile | None = None,
    request_id: str = "one",
    observed: bool = False,
) -> LoggedDecision:
    decision = decided(services.router, profile or chat(1000, 100))
    return services.log.add(request_id, services.wall(), decision, services.config.pool, observed)

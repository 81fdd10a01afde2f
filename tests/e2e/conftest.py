"""Running system of each test module: its stack, and a client that sends through Envoy."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.stack import FLEET
from tests.conftest import wait_for_redis
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import SETTINGS, Behind, PatientStack, here
from tests.waiting import PATIENCE_S

SYSTEM = partial(PatientStack, replicas=here(FLEET), settings=SETTINGS)
"""The system of modules that define no ``system``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder: it starts processes, and shares its module's system."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.process)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_redis(monkeypatch, PATIENCE_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PatientStack]:
    """The system of the test module: its ``system``, or a plain stack."""
    system: Callable[[Path], PatientStack] = getattr(request.module, "system", SYSTEM)
    async with system(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(request: pytest.FixtureRequest, running: PatientStack) -> PatientStack:
    """The running system, behind the Envoy that the test names."""
    if isinstance(running, Behind) and (name := getattr(request, "param", "")):
        await running.behind(name)
    return running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(stack: PatientStack) -> AsyncIterator[EnvoyClient]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield EnvoyClient(stack, session)

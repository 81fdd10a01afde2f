"""The page in a real Chromium."""

from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import AdminSettings
from extproc.ground.clock import Clock
from extproc.lab.harness.processes import free_port
from extproc.lab.harness.stack import SimulatedReplica
from extproc.observe.admin import serve_admin
from extproc.observe.dashboard.routes import page_routes
from extproc.observe.decision_log import PredictionResult
from extproc.proxy.admin import admin_routes
from extproc.proxy.services import Services
from tests.e2e.stack import Stack
from tests.fakes import chat, replica
from tests.observe.dashboard.browser import BINARY, Page, chromium
from tests.observe.dashboard.conftest import poll
from tests.observe.dashboard.test_http import FILES
from tests.observe.dashboard.test_snapshot import wait
from tests.waiting import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BINARY is None, reason="there is no chromium on PATH to look with"),
]
EVIL = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    """A tab; in the end nothing was complained of."""
    async with chromium(tmp_path) as tab:
        yield tab
        assert tab.problems == []


@pytest.fixture
async def admin(services: Services, clock: Clock) -> AsyncIterator[str]:
    """Where the page of a router is that has four replicas, and decided about one request."""
    decision = services.router.decide(chat(1000, 100))
    assert decision is not None
    services.log.add(EVIL, services.wall(), decision, "default")
    services.accuracy.add(PredictionResult(clock(), replica(1), 1.0, 1.2, 0.0, None))
    async with serve_admin(
        "127.0.0.1:0", CollectorRegistry(), admin_routes(services), page_routes()
    ) as address:
        yield f"http://{address}/"


@pytest.fixture
async def shown(page: Page, admin: str) -> Page:
    """The page, with its first news."""
    await page.open(admin)
    await page.until("document.querySelectorAll('#replicas tbody tr').length == 4")
    return page


async def test_only_the_router_is_asked_for_anything(shown: Page, admin: str) -> None:
    asked = {one.removeprefix(admin) for one in shown.requested if not one.startswith("data:")}
    files = {path.removeprefix("/") for path in FILES}
    assert asked == {*files, "dashboard/events"}


async def test_what_clients_wrote_stays_text(shown: Page) -> None:
    button = "document.querySelector('#decisions button')"
    assert await shown.evaluate(f"{button}.textContent") == EVIL
    await shown.evaluate(f"{button}.click()")
    await shown.until("document.querySelector('#comparison tbody tr')")
    assert EVIL in await shown.evaluate("document.querySelector('#comparison').innerText")
    assert await shown.evaluate("document.querySelectorAll('img').length") == 0
    assert await shown.evaluate("document.title") == "extproc router"


async def test_a_request_is_opened_and_closed_by_keyboard(shown: Page) -> None:
    await shown.evaluate("document.querySelector('#decisions button').focus()")
    await shown.press("Enter", 13)
    await shown.until("document.querySelectorAll('#comparison tbody tr').length == 4")
    assert "finishes it in" in await shown.evaluate(
        "document.querySelector('#comparison').innerText"
    )
    assert await shown.evaluate(
        "document.querySelector('#comparison').contains(document.activeElement)"
    )
    await shown.press("Escape", 27)
    await shown.until("!document.querySelector('#comparison').open")
    await shown.until("document.activeElement == document.querySelector('#decisions button')")


async def test_all_that_is_reached_by_tab_is_seen_to_be(shown: Page) -> None:
    reached = []
    for _ in range(5):
        await shown.press("Tab", 9)
        reached.append(await shown.evaluate("document.activeElement.textContent.slice(0, 30)"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await shown.evaluate(outline) == "solid"
    assert reached[:2] == ["Skip to the replicas", "Pause"]
    assert EVIL[:30] in reached


async def test_a_screen_reader_finds_headings_tables_and_names(shown: Page) -> None:
    tree = (await shown.ask("Accessibility.getFullAXTree"))["nodes"]
    nodes = [
        (one["role"]["value"], one.get("name", {}).get("value", ""))
        for one in tree
        if not one["ignored"]
    ]
    headings = [name for role, name in nodes if role == "heading"]
    assert headings == [
        *("extproc " + await shown.evaluate("document.querySelector('#router').textContent"),),
        *("Warnings", "Replicas", "Predicted against actual", "Waiting at this router"),
        *("Routers and pollers", "Last decisions"),
    ]
    assert [name for role, name in nodes if role == "rowheader"][:4] == [
        f"r{number} {replica(number)} llama" for number in range(1, 5)
    ]
    columns = [name for role, name in nodes if role == "columnheader"]
    assert columns[:5] == ["Replica", "Health", "Running", "Waiting", "KV"]
    images = [name for role, name in nodes if role == "image"]
    assert images
    assert images[0].startswith("Of the last 1 requests that ended, half took")
    assert all(name for role, name in nodes if role in ("button", "region", "columnheader"))


@pytest.mark.parametrize("width", [360, 390, 1400])
async def test_it_fits(shown: Page, services: Services, clock: Clock, width: int) -> None:
    poll(services, clock, 2, healthy=False, problem="a-long-word-" * 20)
    fill_and_wait(services)
    await shown.look(width, 800)
    await shown.until("document.querySelector('.health.down')")
    await shown.until("document.querySelector('#held tbody tr')")
    assert await shown.evaluate("document.documentElement.scrollWidth") <= width


async def test_it_is_dark_where_that_is_wished_for(shown: Page) -> None:
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        ".reduce((sum, one) => sum + one) / 3"
    )
    await shown.look(1400, 800, "light")
    assert await shown.evaluate(brightness) > 200
    await shown.look(1400, 800, "dark")
    assert await shown.evaluate(brightness) < 50


async def test_a_warning_is_announced_once_and_goes(
    shown: Page, services: Services, clock: Clock
) -> None:
    assert await shown.evaluate("document.querySelector('#warnings').ariaLive") == "polite"
    every = "[...document.querySelectorAll('#warnings li')]"

    async def told() -> bool:
        poll(services, clock, 1, 3, 4)  # or news are stale before a slow browser has shown them
        poll(services, clock, 2, healthy=False, problem="cannot connect")
        warnings = await shown.evaluate(f"(window.first = {every}).map(one => one.textContent)")
        return bool(warnings == ["r2 is left out: cannot connect."])

    await until(told)
    poll(services, clock, 3, draining=True)
    await shown.until("document.querySelector('.health.draining')")
    assert await shown.evaluate(f"{every}.includes(window.first[0])")

    async def gone() -> bool:
        poll(services, clock)
        said = "!document.querySelector('#no-warnings').hidden"
        return bool(await shown.evaluate(f"{every}.length == 0 && {said}"))

    await until(gone)


async def test_what_it_cannot_show_is_said_and_the_connection_stays(shown: Page) -> None:
    await shown.evaluate("document.querySelector('#warnings').remove()")
    await shown.until("document.querySelector('#state').textContent.includes('cannot show')")
    before = shown.received
    await until(lambda: told_twice(shown, before))
    assert len([one for one in shown.requested if one.endswith("/events")]) == 1
    assert shown.problems
    shown.problems.clear()


async def test_a_prediction_without_bound_is_no_obstacle(
    shown: Page, services: Services, clock: Clock
) -> None:
    services.accuracy.add(PredictionResult(clock(), replica(1), inf, 1.2, 0.0, None))
    before = shown.received
    await until(lambda: told_twice(shown, before))
    assert await shown.evaluate("document.querySelector('#state').textContent") == "live"


async def told_twice(page: Page, before: int) -> bool:
    """Whether two pieces more came; what a page tells is read when it is asked something."""
    await page.evaluate("1")
    return page.received >= before + 2


async def test_it_stands_still_while_it_is_paused(
    shown: Page, services: Services, clock: Clock
) -> None:
    await shown.evaluate("document.querySelector('#pause').click()")
    await shown.until("document.querySelector('#state').textContent == 'paused'")
    poll(services, clock, 2, healthy=False, problem="cannot connect")
    before = shown.received
    await until(lambda: told_twice(shown, before))
    assert not await shown.evaluate("document.querySelector('.health.down')")
    await shown.evaluate("document.querySelector('#pause').click()")
    await shown.until("document.querySelector('.health.down')")


async def test_it_asks_for_the_token_and_keeps_it_out_of_addresses(
    page: Page, services: Services, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("an-example")
    access = AdminSettings(token_file=file)
    routes = admin_routes(services), page_routes()
    async with serve_admin("127.0.0.1:0", CollectorRegistry(), *routes, access) as address:
        await page.open(f"http://{address}/")
        await page.until("!document.querySelector('#token-form').hidden")
        assert await page.evaluate("document.activeElement.id") == "token"
        for token, then in (
            ("wrong", "document.querySelector('#token-error').textContent"),
            ("an-example", "document.querySelectorAll('#replicas tbody tr').length == 4"),
        ):
            await page.evaluate(f"document.querySelector('#token').value = '{token}'")
            await page.press("Enter", 13)
            await page.until(then)
        assert await page.evaluate("document.querySelector('#token-form').hidden")
        assert await page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        await page.open(f"http://{address}/")  # this tab knows it
        await page.until("document.querySelectorAll('#replicas tbody tr').length == 4")
        assert not [one for one in page.requested if "an-example" in one]
        page.problems.clear()  # each 401


async def test_it_says_when_the_router_is_gone_and_goes_on_when_it_is_back(
    page: Page, services: Services
) -> None:
    def serving(address: str) -> Any:
        return serve_admin(address, CollectorRegistry(), admin_routes(services), page_routes())

    async with serving(f"127.0.0.1:{free_port()}") as address:  # it comes back there
        await page.open(f"http://{address}/")
        await page.until("document.querySelector('#state').textContent == 'live'")
    old = "document.querySelector('#state').textContent.includes('figures are old')"
    await page.until(old)
    for _ in range(2):
        await page.evaluate("document.querySelector('#pause').click()")
        assert await page.evaluate(old)
    async with serving(address):
        await page.until("document.querySelector('#state').textContent == 'live'")
        await page.evaluate("document.querySelector('#pause').click()")
        await page.until("document.querySelector('#state').textContent == 'paused'")
    await page.until(old)
    async with serving(address):
        await page.until("document.querySelector('#state').textContent == 'paused'")
    page.problems.clear()  # that the router did not answer


async def test_a_replica_that_is_killed_is_shown(page: Page, tmp_path: Path) -> None:
    replicas = [SimulatedReplica(name, "llama-8b-h100") for name in ("one", "two")]
    async with Stack(tmp_path / "stack", replicas) as stack:
        await page.open(f"{stack.router_admin}/")
        await page.until("document.querySelectorAll('.health.ok').length == 2")
        await page.until("document.querySelector('#parts').textContent.includes(':')")
        await stack.kill("two")
        await page.until("document.querySelectorAll('.health.down').length == 1")
        refused = "two is left out: cannot connect: connection refused."  # if need be, once more
        await page.until(f"document.querySelector('#warnings').textContent == '{refused}'")


def fill_and_wait(services: Services) -> None:
    """A request waits, for all replicas are full."""
    for number in (1, 3, 4):
        services.fleet.dispatch(replica(number), chat(41_000, 1000))
    wait(services, "blue")

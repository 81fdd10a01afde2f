"""The page in a browser: content, keyboard, screen reader, token, and a router that goes away."""

from collections import defaultdict
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.config import AdminSettings
from extproc.fleet.digest import NOTHING, Digest, DigestKind
from extproc.lab.harness.processes import free_port
from extproc.proxy.services import Services
from tests.fakes import chat, replica
from tests.observe.conftest import decide, serving
from tests.observe.dashboard.browser import BINARY, BrowserPage, chromium, tab
from tests.observe.dashboard.conftest import ended, poll, wait
from tests.waiting import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BINARY is None, reason="no chromium is on the PATH"),
]
EVIL = "<img src=x onerror=document.title='hacked'>"
ROWS, DOWN = "$$('#replicas tbody tr')", "$('.health.unhealthy')"
STATE, PAUSE = "$('#state').textContent", "$('#pause').click()"
REQUEST, COMPARISON = "$('#decisions button')", "$('#comparison')"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
async def page(browser: str) -> AsyncIterator[BrowserPage]:
    async with tab(browser) as page:
        yield page
        assert page.problems == []


@pytest.fixture
async def shown(page: BrowserPage, services: Services, router: str) -> BrowserPage:
    """The page of a router with four replicas and a decision, after its first snapshot."""
    decide(services, request_id=EVIL)
    ended(services, actual=1.2)
    await page.open(f"http://{router}/")
    await page.until(f"{ROWS}.length == 4")
    return page


async def test_text_of_clients_is_no_markup(shown: BrowserPage) -> None:
    assert await shown.evaluate(f"{REQUEST}.textContent") == EVIL
    await shown.evaluate(f"{REQUEST}.click()")
    await shown.until("$('#comparison tbody tr')")
    assert EVIL in await shown.evaluate(f"{COMPARISON}.innerText")
    assert await shown.evaluate("$$('img').length") == 0
    assert await shown.evaluate("document.title") == "extproc router"


async def test_other_router_is_a_link_that_stays_while_its_digests_age(
    shown: BrowserPage, services: Services
) -> None:
    now, admin = services.clock(), "10.0.0.2:9090"
    digest = Digest("other:50051:1f", 1, now, DigestKind.WHOLE, (), NOTHING, admin)
    services.fleet.receive_digest(digest)
    await shown.until("(window.link = $('#parts a'))")
    assert await shown.evaluate("[link.textContent, link.href]") == [
        "other:50051",
        "http://10.0.0.2:9090/",
    ]
    said = await shown.evaluate("$('#parts').textContent")
    assert "this router and 1 more: other:50051, newest digest " in said
    await two_more_snapshots(shown)
    assert await shown.evaluate("$('#parts').textContent") != said
    assert await shown.evaluate("link.isConnected")


async def test_request_is_opened_and_closed_by_keyboard(shown: BrowserPage) -> None:
    await shown.evaluate(f"{REQUEST}.focus()")
    await shown.press("Enter", 13)
    await shown.until("$$('#comparison tbody tr').length == 4")
    assert "finishes it in" in await shown.evaluate(f"{COMPARISON}.innerText")
    assert await shown.evaluate(f"{COMPARISON}.contains(document.activeElement)")
    await shown.press("Escape", 27)
    await shown.until(f"!{COMPARISON}.open")
    await shown.until(f"document.activeElement == {REQUEST}")


async def test_elements_reached_by_tab_are_outlined(shown: BrowserPage) -> None:
    reached = []
    for _ in range(6):
        await shown.press("Tab", 9)
        reached.append(await shown.evaluate("document.activeElement.textContent.slice(0, 30)"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await shown.evaluate(outline) == "solid"
    assert reached[:2] == ["Skip to the replicas", "Pause"]
    assert EVIL[:30] in reached


async def test_screen_reader_finds_headings_tables_and_names(shown: BrowserPage) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for node in (await shown.command("Accessibility.getFullAXTree"))["nodes"]:
        if not node["ignored"]:
            found[node["role"]["value"]].append(node.get("name", {}).get("value", ""))
    assert found["heading"] == [
        "extproc " + await shown.evaluate("$('#router').textContent"),
        *("Warnings", "Replicas", "Last hour", "Predicted against actual"),
        *("Waiting at this router", "Routers and pollers", "Last decisions"),
    ]
    assert found["rowheader"][:4] == [
        f"r{number} {replica(number)} llama" for number in (1, 2, 3, 4)
    ]
    assert found["columnheader"][:5] == ["Replica", "Health", "Running", "Waiting", "KV"]
    assert found["image"][0].startswith("Of the last 1 requests that ended, half took")
    assert all(found["button"] + found["region"] + found["columnheader"])


@pytest.mark.parametrize("width", [360, 390, 1400])
async def test_page_fits_the_window(shown: BrowserPage, services: Services, width: int) -> None:
    poll(services, 2, healthy=False, problem="a-long-word-" * 20)
    for number in (1, 3, 4):
        services.fleet.dispatch(replica(number), chat(41_000, 1000))
    wait(services, "blue")
    await shown.look(width, 800)
    await shown.until(DOWN)
    await shown.until("$('#queued tbody tr')")
    assert await shown.evaluate("document.documentElement.scrollWidth") <= width


async def test_page_is_dark_where_the_user_prefers_it(shown: BrowserPage) -> None:
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        ".reduce((sum, value) => sum + value) / 3"
    )
    await shown.look(1400, 800, "light")
    assert await shown.evaluate(brightness) > 200
    await shown.look(1400, 800, "dark")
    assert await shown.evaluate(brightness) < 50


async def test_warning_is_announced_once_and_goes(shown: BrowserPage, services: Services) -> None:
    assert await shown.evaluate("$('#warnings').ariaLive") == "polite"
    every = "$$('#warnings li')"

    async def warned() -> bool:
        poll(services, 1, 3, 4)  # else their state is stale before a slow browser shows it
        poll(services, 2, healthy=False, problem="cannot connect")
        warnings = await shown.evaluate(f"(window.first = {every}).map(item => item.textContent)")
        return bool(warnings == ["r2 is excluded: cannot connect."])

    await until(warned)
    poll(services, 3, draining=True)
    await shown.until("$('.health.draining')")
    assert await shown.evaluate(f"{every}.includes(window.first[0])")

    async def gone() -> bool:
        poll(services)
        return bool(await shown.evaluate(f"!{every}.length && !$('#no-warnings').hidden"))

    await until(gone)


async def test_warning_of_a_fault_that_costs_requests_comes_first(
    shown: BrowserPage, services: Services
) -> None:
    first = "$('#warnings li')?.textContent ?? ''"
    services.delays.redis_refusal = "OOM"
    await shown.until(f"({first}).startsWith('Redis stores nothing')")

    async def risen() -> bool:
        poll(services, healthy=False, problem="cannot connect")
        return str(await shown.evaluate(first)).startswith("No replica is healthy")

    await until(risen)


async def two_more_snapshots(page: BrowserPage) -> None:
    before = page.received

    async def arrived() -> bool:
        await page.evaluate("1")  # events are read along with the answer to a command
        return page.received >= before + 2

    await until(arrived)


async def test_broken_page_says_so_and_keeps_the_connection(shown: BrowserPage) -> None:
    await shown.evaluate("$('#warnings').remove()")
    await shown.until(f"{STATE}.includes('cannot show')")
    await two_more_snapshots(shown)
    assert len([url for url in shown.requested if url.endswith("/events")]) == 1
    assert shown.problems
    shown.problems.clear()


async def test_infinite_prediction_does_not_stop_the_page(
    shown: BrowserPage, services: Services
) -> None:
    ended(services, inf, 1.2)
    await two_more_snapshots(shown)
    assert await shown.evaluate(STATE) == "live"


async def test_paused_page_does_not_change(shown: BrowserPage, services: Services) -> None:
    await shown.evaluate(PAUSE)
    await shown.until(f"{STATE} == 'paused'")
    poll(services, 2, healthy=False, problem="cannot connect")
    await two_more_snapshots(shown)
    assert not await shown.evaluate(DOWN)
    await shown.evaluate(PAUSE)
    await shown.until(DOWN)


async def test_token_stays_in_the_tab(
    page: BrowserPage, services: Services, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("an-example")
    async with serving(services, AdminSettings(token_file=file)) as address:
        await page.open(f"http://{address}/")
        await page.until("!$('#token-form').hidden")
        assert await page.evaluate("document.activeElement.id") == "token"
        for token, result in (
            ("wrong", "$('#token-error').textContent"),
            ("an-example", f"{ROWS}.length == 4"),
        ):
            await page.evaluate(f"$('#token').value = '{token}'")
            await page.press("Enter", 13)
            await page.until(result)
        assert await page.evaluate("$('#token-form').hidden")
        assert await page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        await page.open(f"http://{address}/")  # the tab knows the token
        await page.until(f"{ROWS}.length == 4")
        assert not [url for url in page.requested if "an-example" in url]
        page.problems.clear()  # of the 401s


async def test_page_says_that_the_router_is_gone_and_reconnects(
    page: BrowserPage, services: Services
) -> None:
    async with serving(services, address=f"127.0.0.1:{free_port()}") as address:
        await page.open(f"http://{address}/")
        await page.until(f"{STATE} == 'live'")
    old = f"{STATE}.includes('figures are old')"
    await page.until(old)
    for _ in range(2):
        await page.evaluate(PAUSE)
        assert await page.evaluate(old)
    async with serving(services, address=address):
        await page.until(f"{STATE} == 'live'")
        await page.evaluate(PAUSE)
        await page.until(f"{STATE} == 'paused'")
    await page.until(old)
    async with serving(services, address=address):
        await page.until(f"{STATE} == 'paused'")
    page.problems.clear()  # of the failed connections

"""Admin addresses guard their pages by token and TLS, and read renewed files by themselves."""

import asyncio
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from extproc.config import AdminSettings
from extproc.ground.files import read_certificates
from extproc.ground.tls import trusting
from extproc.observe.admin import serve_admin
from tests.certificates import Authority
from tests.conftest import Cli, Logged
from tests.waiting import PATIENCE_S

TOKEN = "an-example"
write = Path.write_text
WRONG = ("", "Bearer", "Bearer other", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}é")
WITHOUT_TOKEN = ("/livez", "/healthz", "/readyz", "/public")
WITH_TOKEN = {"/metrics": 200, "/private": 200, "/none": 404}


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def serving(access: AdminSettings) -> AbstractAsyncContextManager[str]:
    private, public = [web.get("/private", hello)], [web.get("/public", hello)]
    return serve_admin("127.0.0.1:0", CollectorRegistry(), private, public, access)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


async def status(url: str, authorization: str = "") -> int:
    headers = {"Authorization": authorization} if authorization else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status


async def test_token_is_needed_for_all_but_health_and_public_pages(file: Path) -> None:
    async with serving(AdminSettings(token_file=file)) as address:
        for path in WITHOUT_TOKEN:
            assert await status(f"http://{address}{path}") == 200
        for path, expected in WITH_TOKEN.items():
            url = f"http://{address}{path}"
            for wrong in WRONG:
                assert await status(url, wrong) == 401
            for scheme in ("Bearer", "bearer"):
                assert await status(url, f"{scheme} {TOKEN}") == expected


async def test_changed_token_replaces_the_old_one(file: Path, logged: Logged) -> None:
    async with serving(AdminSettings(token_file=file)) as address:
        url = f"http://{address}/metrics"
        write(file, "another-one")
        assert await status(url, f"Bearer {TOKEN}") == 401
        assert await status(url, "Bearer another-one") == 200
        write(file, "")
        for _ in range(2):
            assert await status(url, "Bearer ") == 401
            assert await status(url, "Bearer another-one") == 200
        (line,) = logged.lines(
            "admin token cannot be used: keeping the last usable content, if any, and retrying"
        )
        assert "must hold a token" in str(line["error"])


@pytest.mark.parametrize("content", [" \n", "\xff\n"])
async def test_unusable_token_file_stops_the_start(file: Path, content: str) -> None:
    write(file, content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"admin\.token_file: .*must hold a token"):
        await serving(AdminSettings(token_file=file)).__aenter__()


async def test_client_that_hangs_up_leaves_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    over = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"more")
                await asyncio.sleep(0)
        finally:
            over.set()

    routes = [web.get("/endless", endless)]
    async with (
        serve_admin("127.0.0.1:0", CollectorRegistry(), routes) as address,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://{address}/endless") as response:
            await response.content.read(4)
        await asyncio.wait_for(over.wait(), PATIENCE_S)
    assert caplog.records == []


async def trusts(address: str, cert: Path) -> bool:
    connector = aiohttp.TCPConnector(ssl=trusting(read_certificates("tls_cert", cert)))
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            async with session.get(f"https://{address}/livez") as response:
                return response.status == 200
        except aiohttp.ClientSSLError:
            return False


async def test_first_certificate_of_a_chain_is_trusted_alone(tmp_path: Path) -> None:
    between = Authority(tmp_path / "between", Authority(tmp_path / "root"))
    (used, key), (other, _) = between.sign("used"), between.sign("other")
    for chain in (used, other):
        chain.write_text(chain.read_text() + between.file.read_text())
    async with serving(AdminSettings(tls_cert=used, tls_key=key)) as address:
        assert await trusts(address, used)
        assert not await trusts(address, other)


async def test_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, logged: Logged
) -> None:
    authority = Authority(tmp_path / "authority")
    files = {"tls_cert": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key"}

    def put(name: str) -> Path:
        cert, key = authority.sign(name)
        shutil.copy(cert, files["tls_cert"])
        shutil.copy(key, files["tls_key"])
        return cert

    first = put("first")
    async with serving(AdminSettings(**files)) as address:
        assert await trusts(address, first)
        second = put("second")
        assert await trusts(address, second)
        assert not await trusts(address, first)
        files["tls_key"].write_text("none")
        assert await trusts(address, second)
        (line,) = logged.lines(
            "certificate cannot be used: keeping the last usable content, if any, and retrying"
        )
        assert "admin.tls_key" in str(line["error"])
        with pytest.raises(aiohttp.ClientError):
            await status(f"http://{address}/livez")


@pytest.mark.parametrize("command", ["serve", "poll", "check"])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"token_file": "none"}, "admin.token_file: none: No such file"),
        ({"tls_cert": "none", "tls_key": "none"}, "admin.tls_cert: none: No such file"),
        ({"tls_cert": "none"}, "tls_cert and tls_key go together"),
    ],
)
def test_unusable_file_stops_a_command_with_its_name(
    command: str, settings: dict[str, str], problem: str, cli: Cli
) -> None:
    ports = ("--serve.admin=127.0.0.1:0", "--poll.admin=127.0.0.1:0")
    files = (f"--admin.{name}={file}" for name, file in settings.items())
    _, errors = cli(command, *ports, *files, status=2)
    assert problem in "\n".join(errors)


def test_check_warns_of_an_expired_certificate(tmp_path: Path, cli: Cli) -> None:
    cert, key = Authority(tmp_path / "authority").sign("router", days=-1)
    printed, _ = cli("check", f"--admin.tls_cert={cert}", f"--admin.tls_key={key}")
    assert f"admin.tls_cert: {cert}: certificate has expired" in "\n".join(printed)

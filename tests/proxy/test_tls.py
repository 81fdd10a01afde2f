"""TLS of the gRPC ports of router and EDS server."""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.cli import main
from extproc.config import EdsSettings
from extproc.envoy.eds_server import EdsServer
from extproc.ground.tls import watched
from extproc.proxy.service import GrpcServer
from tests.certificates import Authority
from tests.conftest import Logged, too_many_open_files
from tests.proxy.conftest import config_of, router_of
from tests.waiting import PATIENCE_S

OLD = "certificate cannot be used: keeping the last usable content, if any, and retrying"
SERVING = health_pb2.HealthCheckResponse.SERVING


class Files:
    """Certificate, key and client authority of a server, which a test replaces."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.others = Authority(directory / "ours"), Authority(directory / "others")
        self.cert, self.key = directory / "tls.crt", directory / "tls.key"
        self.client_ca = directory / "ca.crt"
        self.put(*self.ours.sign("router"))
        shutil.copy(self.ours.file, self.client_ca)

    def put(self, cert: Path, key: Path) -> None:
        shutil.copy(cert, self.cert)
        shutil.copy(key, self.key)

    @property
    def settings(self) -> dict[str, str]:
        files = {"tls_cert": self.cert, "tls_key": self.key, "tls_client_ca": self.client_ca}
        return {name: str(path) for name, path in files.items()}

    def flags(self, section: str) -> list[str]:
        return [f"--{section}.{name}={path}" for name, path in self.settings.items()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


Serving = Callable[[dict[str, str]], AbstractAsyncContextManager[int]]


@asynccontextmanager
async def router(settings: dict[str, str]) -> AsyncIterator[int]:
    server = GrpcServer(router_of(config_of(serve=settings)))
    port = await server.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def control_plane(settings: dict[str, str]) -> AsyncIterator[int]:
    server = EdsServer({}, EdsSettings.model_validate(settings))
    port = await server.start("127.0.0.1:0")
    try:
        yield port
    finally:
        await server.stop()


@pytest.fixture(params=[router, control_plane])
def serving(request: pytest.FixtureRequest) -> Serving:
    kind: Serving = request.param
    return kind


async def health(port: int, trusted: Authority, shown: tuple[Path, Path] | None = None) -> int:
    chain, key = (path.read_bytes() for path in shown) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(trusted.file.read_bytes(), key, chain)
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=own) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=PATIENCE_S)
        return int(answer.status)


async def refused(port: int, trusted: Authority, shown: tuple[Path, Path] | None = None) -> bool:
    try:
        await health(port, trusted, shown)
    except grpc.aio.AioRpcError as error:
        return bool(error.code() == grpc.StatusCode.UNAVAILABLE)
    return False


async def test_client_ca_admits_only_signed_clients(serving: Serving, files: Files) -> None:
    async with serving(files.settings) as port:
        assert await health(port, files.ours, files.ours.sign("envoy")) == SERVING
        assert await refused(port, files.ours, files.others.sign("stranger"))
        assert await refused(port, files.ours)
        assert await refused(port, files.others, files.ours.sign("envoy"))  # distrusted
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest())


async def test_tls_without_client_ca_admits_anybody(serving: Serving, files: Files) -> None:
    del (settings := files.settings)["tls_client_ca"]
    async with serving(settings) as port:
        assert await health(port, files.ours) == SERVING


async def test_changed_tls_files_apply_to_next_connection(serving: Serving, files: Files) -> None:
    envoy = files.ours.sign("envoy")
    async with serving(files.settings) as port:
        assert await health(port, files.ours, envoy) == SERVING
        files.put(*files.others.sign("router"))
        assert await refused(port, files.ours, envoy)
        assert await health(port, files.others, envoy) == SERVING
        shutil.copy(files.others.file, files.client_ca)
        assert await refused(port, files.others, envoy)
        assert await health(port, files.others, files.others.sign("envoy")) == SERVING


async def test_unusable_tls_files_keep_last_content(
    serving: Serving, files: Files, logged: Logged
) -> None:
    envoy = files.ours.sign("envoy")
    async with serving(files.settings) as port:
        cert, key = files.ours.sign("renewed")
        shutil.copy(cert, files.cert)  # its key comes later
        for _ in range(3):
            assert await health(port, files.ours, envoy) == SERVING
        (line,) = logged.lines(OLD)
        assert "is not the key of the certificate in" in str(line["error"])
        shutil.copy(key, files.key)
        assert await health(port, files.ours, envoy) == SERVING
        assert len(logged.lines("certificate read again after a change")) == 1
        files.client_ca.unlink()
        assert await health(port, files.ours, envoy) == SERVING
        assert len(logged.lines(OLD)) == 2


def test_unreadable_tls_files_are_read_again(files: Files, logged: Logged) -> None:
    renewed = watched("serve", "Envoy", files.cert, files.key)
    renewed.read()
    files.put(*files.ours.sign("renewed"))
    with too_many_open_files():
        assert renewed.if_changed() is None
    (line,) = logged.lines(OLD)
    assert "Too many open files" in str(line["error"])
    assert renewed.if_changed() is not None


async def test_expired_certificate_is_logged(
    serving: Serving, files: Files, logged: Logged
) -> None:
    files.put(*files.ours.sign("router", days=-1))
    async with serving(files.settings):
        (line,) = logged.lines("Envoy will not trust this certificate: replace it")
    assert line["reason"] == f"{files.cert}: certificate has expired"


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


PROBLEMS: dict[str, tuple[Callable[[Files], object], str, str]] = {
    "missing": (lambda files: files.key.unlink(), "tls_key", "No such file or directory"),
    "directory": (lambda files: replace_by_directory(files.cert), "tls_cert", "Is a directory"),
    "other key": (
        lambda files: shutil.copy(files.ours.sign("other")[1], files.key),
        *("tls_key", "is not the key of the certificate in"),
    ),
    "no certificate": (
        lambda files: shutil.copy(files.key, files.cert),
        *("tls_cert", "holds no certificate (PEM)"),
    ),
    "no key": (
        lambda files: shutil.copy(files.cert, files.key),
        *("tls_key", "holds no key (PEM), or one with a password"),
    ),
    "no authority": (
        lambda files: files.client_ca.write_bytes(b""),
        *("tls_client_ca", "holds no certificate (PEM)"),
    ),
}


@pytest.mark.parametrize(
    ("command", "section"),
    [("serve", "serve"), ("eds", "eds"), ("check", "serve"), ("check", "eds")],
)
@pytest.mark.parametrize(("spoil", "setting", "said"), PROBLEMS.values(), ids=PROBLEMS)
def test_unusable_tls_file_is_named(
    files: Files, capsys: pytest.CaptureFixture[str], command: str, section: str,
    spoil: Callable[[Files], object], setting: str, said: str,
) -> None:  # fmt: skip
    spoil(files)
    assert main([command, "--serve.admin=127.0.0.1:0", *files.flags(section)]) == 2
    error = capsys.readouterr().err
    assert f"{section}.{setting}: {files.settings[setting]}" in error
    assert said in error


@pytest.mark.parametrize("section", ["serve", "eds"])
def test_check_warns_of_expired_file(
    files: Files, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    files.put(*files.ours.sign("router", days=-1))
    assert main(["check", *files.flags(section)]) == 0
    assert f"{section}.tls_cert: {files.cert}: certificate has expired" in capsys.readouterr().out

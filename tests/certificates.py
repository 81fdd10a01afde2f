"""Certificates made with the ``openssl`` command."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = "subjectAltName=DNS:router,DNS:localhost,IP:127.0.0.1"

_Pair = tuple[bytes, bytes]  # PEM texts of a certificate and its key


class Authority:
    """Certificate authority with its files in ``directory``; self-signed without ``parent``.

    Keys and certificates are made once per process: authorities whose directories have the same
    name have the same key, and sign equal certificates.
    """

    def __init__(self, directory: Path, parent: "Authority | None" = None) -> None:
        directory.mkdir()
        self._directory = directory
        self._pair: _Pair = _new_authority(directory.name, parent._pair if parent else None)
        self.file, _ = self._written("ca", self._pair)

    def sign(self, name: str, days: int = 1) -> tuple[Path, Path]:
        """Returns the files of a certificate for loopback and its key; ``days`` < 0: expired."""
        return self._written(name, _signed(self._pair, name, days))

    def _written(self, name: str, pair: _Pair) -> tuple[Path, Path]:
        cert, key = (self._directory / f"{name}.{end}" for end in ("pem", "key"))
        cert.write_bytes(pair[0])
        key.write_bytes(pair[1])
        return cert, key


@cache
def _new_authority(name: str, parent: _Pair | None) -> _Pair:
    with TemporaryDirectory() as folder:
        cert, key = Path(folder, "ca.pem"), Path(folder, "ca.key")
        signer = _signer(Path(folder), parent) if parent else ()
        subject = ("-x509", *NEW_KEY, "-subj", f"/CN={name}")
        openssl("req", *subject, *signer, "-keyout", key, "-out", cert)
        return cert.read_bytes(), key.read_bytes()


@cache
def _signed(authority: _Pair, name: str, days: int) -> _Pair:
    with TemporaryDirectory() as folder:
        cert, key, request = (Path(folder, f"{name}.{end}") for end in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", _NAMES)
        openssl("req", *NEW_KEY, *subject, "-keyout", key, "-out", request)
        signer = (*_signer(Path(folder), authority), "-copy_extensions", "copy")
        openssl("x509", "-req", "-in", request, *signer, "-days", days, "-out", cert)
        return cert.read_bytes(), key.read_bytes()


def _signer(folder: Path, authority: _Pair) -> tuple[object, ...]:
    """Writes the authority's files and returns the options that name them."""
    cert, key = folder / "signer.pem", folder / "signer.key"
    cert.write_bytes(authority[0])
    key.write_bytes(authority[1])
    return "-CA", cert, "-CAkey", key


def openssl(*arguments: object) -> None:
    """Runs openssl; skips the test if openssl is not on PATH."""
    if (program := shutil.which("openssl")) is None:
        pytest.skip("openssl, which makes the certificates, is not on PATH")
    run = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

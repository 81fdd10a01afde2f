"""Certificates made with the ``openssl`` command."""

import shutil
import subprocess
from pathlib import Path

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = "subjectAltName=DNS:router,DNS:localhost,IP:127.0.0.1"


class Authority:
    """Certificate authority with its files in ``directory``; self-signed without ``parent``."""

    def __init__(self, directory: Path, parent: "Authority | None" = None) -> None:
        directory.mkdir()
        self._directory = directory
        self.file, self._key = directory / "ca.pem", directory / "ca.key"
        subject = ("-x509", *NEW_KEY, "-subj", f"/CN={directory.name}")
        signer = () if parent is None else ("-CA", parent.file, "-CAkey", parent._key)
        openssl("req", *subject, *signer, "-keyout", self._key, "-out", self.file)

    def sign(self, name: str, days: int = 1) -> tuple[Path, Path]:
        """Returns the files of a certificate for loopback and its key; ``days`` < 0: expired."""
        cert, key, request = (self._directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", _NAMES)
        openssl("req", *NEW_KEY, *subject, "-keyout", key, "-out", request)
        signer = ("-CA", self.file, "-CAkey", self._key, "-copy_extensions", "copy")
        openssl("x509", "-req", "-in", request, *signer, "-days", days, "-out", cert)
        return cert, key


def openssl(*arguments: object) -> None:
    """Runs openssl; skips the test if openssl is not on PATH."""
    if (program := shutil.which("openssl")) is None:
        pytest.skip("openssl, which makes the certificates, is not on PATH")
    run = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

"""Certificates that a test makes with openssl, as people do."""

import shutil
import subprocess
from pathlib import Path

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAMES = "subjectAltName=DNS:router,DNS:localhost,IP:127.0.0.1"


class Authority:
    """Signs certificates; its own is ``ca.pem`` in its directory, signed by ``parent``, if any."""

    def __init__(self, directory: Path, parent: "Authority | None" = None) -> None:
        directory.mkdir()
        self._directory = directory
        self.file, self._key = directory / "ca.pem", directory / "ca.key"
        kind = ("-x509", *NEW_KEY, "-subj", f"/CN={directory.name}")
        by = () if parent is None else ("-CA", parent.file, "-CAkey", parent._key)
        openssl("req", *kind, *by, "-keyout", self._key, "-out", self.file)

    def sign(self, name: str, days: int = 1) -> tuple[Path, Path]:
        """A certificate for loopback and its key; of negative ``days``, one that has expired."""
        cert, key, asked = (self._directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", _NAMES)
        openssl("req", *NEW_KEY, *subject, "-keyout", key, "-out", asked)
        by = ("-CA", self.file, "-CAkey", self._key, "-copy_extensions", "copy")
        openssl("x509", "-req", "-in", asked, *by, "-days", days, "-out", cert)
        return cert, key


def openssl(*arguments: object) -> None:
    """Runs openssl; skips the test where there is none."""
    if (program := shutil.which("openssl")) is None:
        pytest.skip("makes its certificates with openssl, which is not on PATH")
    made = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr

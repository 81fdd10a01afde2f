"""Files that settings name: whatever keeps one from being used is one line that says which."""

import ssl
from pathlib import Path


def read(setting: str, path: Path) -> bytes:
    """What is in the file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}: {path}: {error.strerror}") from None


def read_certificates(setting: str, path: Path) -> bytes:
    """What is in a file of certificates.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    content = read(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{setting}: {path} holds no certificate (PEM)") from None
    return content

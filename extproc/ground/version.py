"""Version and commit of this build."""

import subprocess
from contextlib import suppress
from pathlib import Path

from extproc import __version__

_PACKAGE = Path(__file__).parents[1]
_BUILT = _PACKAGE / "commit.txt"  # written by ``make release``, for wheel and image
_HEAD = ["git", "-C", str(_PACKAGE), "rev-parse", "--short=12", "HEAD"]


def commit() -> str:
    """Return the commit of a checkout or of a built package, or an empty string if unknown."""
    with suppress(OSError, subprocess.SubprocessError):
        if (_PACKAGE.parent / ".git").exists():
            return subprocess.check_output(
                _HEAD, stderr=subprocess.DEVNULL, text=True, timeout=5
            ).strip()
    with suppress(OSError):
        return _BUILT.read_text(encoding="utf-8").strip()
    return ""


def described() -> str:
    """Return the version and, if known, the commit: ``0.1.0 (commit 0123456789ab)``."""
    return f"{__version__} (commit {built})" if (built := commit()) else __version__

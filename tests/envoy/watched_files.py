"""Listeners and clusters in watched files, by the commands and the bootstrap in docs/envoy.md."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_PAGE = Path(__file__).parents[2] / "docs" / "envoy.md"


def split(whole: dict[str, Any], folder: Path) -> None:
    """Writes listeners and clusters of a bootstrap into files of the folder, as the page says."""
    folder.mkdir(exist_ok=True)
    source = folder.parent / "whole.yaml"
    source.write_text(yaml.safe_dump(whole), encoding="utf-8")
    command, *script, end = _documented("sh", "os.rename").splitlines()
    assert command == "python3 - envoy.yaml /etc/envoy/live <<'EOF'"
    assert end == "EOF"
    subprocess.run([sys.executable, "-c", "\n".join(script), source, folder], check=True)


def bootstrap(whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The bootstrap of the page for a folder to which that one was split."""
    text = _documented("yaml", "watched_directory").replace("/etc/envoy/live", str(folder))
    made: dict[str, Any] = yaml.safe_load(text)
    clusters = whole["static_resources"]["clusters"]
    made["static_resources"]["clusters"] = [one for one in clusters if one["name"] == "eds"]
    return {**whole, **made}


def _documented(language: str, word: str) -> str:
    """The code block of the page that has the word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if word in block]
    return str(found)

"""Listeners and clusters in watched files, by the script and bootstrap of docs/envoy.md."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_PAGE = Path(__file__).parents[2] / "docs" / "envoy.md"


def split(whole: dict[str, Any], folder: Path) -> None:
    """Write listeners and clusters of a bootstrap into files of a folder, by the page's script."""
    folder.mkdir(exist_ok=True)
    source = folder.parent / "whole.yaml"
    source.write_text(yaml.safe_dump(whole), encoding="utf-8")
    command, *script, end = _documented("sh", "os.rename").splitlines()
    assert command == "python3 - envoy.yaml /etc/envoy/live <<'EOF'"
    assert end == "EOF"
    subprocess.run([sys.executable, "-c", "\n".join(script), source, folder], check=True)


def bootstrap(whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the page's bootstrap for a folder with the files of ``whole``."""
    text = _documented("yaml", "watched_directory").replace("/etc/envoy/live", str(folder))
    made: dict[str, Any] = yaml.safe_load(text)
    clusters = whole["static_resources"]["clusters"]
    made["static_resources"]["clusters"] = [
        cluster for cluster in clusters if cluster["name"] == "eds"
    ]
    return {**whole, **made}


def _documented(language: str, word: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if word in block]
    return str(found)

"""Answers of a simulated replica equal those in ``answers.yaml``.

``python -m tests.lab.simulator.test_answers`` rewrites the file.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica
from extproc.lab.simulator.server import serving
from tests.lab.simulator.conftest import SETTINGS

FILE = Path(__file__).with_name("answers.yaml")
CASES: dict[str, dict[str, Any]] = yaml.load(FILE.read_text(), yaml.CSafeLoader)
VARIES = (r"[0-9a-f]{32}", "ID"), (r'("created(?:_at)?": ?)\d{10}', r"\g<1>0")


async def answered(
    client: ClientSession, path: str, body: object = None, headers: dict[str, str] | None = None
) -> dict[str, object]:
    method = "GET" if body is None else "POST"
    async with client.request(method, path, json=body, headers=headers) as response:
        text = await response.text()
    for pattern, constant in VARIES:
        text = re.sub(pattern, constant, text)
    return {"status": response.status, "type": response.content_type, "text": text}


@pytest.mark.parametrize("name", CASES)
async def test_answer_equals_the_recorded_answer(client: ClientSession, name: str) -> None:
    assert await answered(client, **CASES[name]["request"]) == CASES[name]["answer"]


async def _answer(request: dict[str, Any]) -> dict[str, object]:
    async with (
        serving(Replica(SETTINGS), "127.0.0.1", 0) as (port, _),
        ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        return await answered(client, **request)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if '"' in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


if __name__ == "__main__":
    for _case in CASES.values():
        _case["answer"] = asyncio.run(_answer(_case["request"]))
    yaml.SafeDumper.add_representer(str, _represent_text)
    FILE.write_text(yaml.safe_dump(CASES, sort_keys=False, width=10_000))

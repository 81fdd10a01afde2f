"""Texts of the golden files, from processes: routers, a poller and replicas that never change."""

import asyncio
import io
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import grpc
from aiohttp import web
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from extproc.cli import main
from extproc.lab.harness.pages import get_text
from extproc.lab.harness.processes import Check, Process, answers, flags, listening, redis_binary
from extproc.proxy.service import SERVICE
from tests.golden.conversations import (
    CONVERSATIONS,
    FAST,
    KV_TOKENS,
    OTHERS_END,
    ROUTERS,
    Conversation,
    ConversationStep,
)
from tests.waiting import PATIENCE_S, until

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "data/vllm/metrics-idle.txt"
"""Metrics of a real vLLM 0.32, see the README in the same folder."""
COMMANDS = (
    *("", "serve", "poll", "eds", "check", "top", "explain", "what-if", "simulate", "demo"),
    *("replicas", "replicas add", "replicas drain", "replicas remove", "replicas list"),
)
_HERE = f"127.{random.randint(101, 199)}.{random.randint(101, 199)}."
_THERE = "127.100.100."
"""Loopback prefix in the golden files, as long as the real prefix: message lengths are equal."""
_REPLICAS = {"plain": 3, "policy": 1, "shared": 1}
"""Number of replicas in all pools of a router; by default 2."""
_LATER_S = 0.5
"""Delay of the slow replica: the order of the first answers breaks ties."""
_STOP_S = 15.0  # in which a router writes the end of its record
_LONGEST_SHOWN = 600
"""Characters of a body."""
_MEASURED = re.compile(
    r"(_at|_s|_seconds|^at|^seconds|^score|^terms_s\.\w+|^stretch|_weight|output_tokens$|^kv_pressure|^learned\.\w+)$"
)
"""Keys of measured times, and of figures computed from them."""
_LIBRARY_FAMILIES = ("python_", "process_")
"""Metric families of ``prometheus_client`` itself."""


def collect(folder: Path) -> dict[str, str]:
    """Return the text of each golden file; the processes use ``folder`` for their files."""
    inherited = {key: text for key, text in os.environ.items() if not key.startswith("EXTPROC_")}
    environment = inherited | {"COLUMNS": "100", "LINES": "40"}
    with patch.dict(os.environ, environment, clear=True):
        return {"help.txt": _help()} | asyncio.run(_of_processes(folder))


async def _of_processes(folder: Path) -> dict[str, str]:
    texts = {}
    async with AsyncExitStack() as others, AsyncExitStack() as routers:

        async def start(
            stack: AsyncExitStack, name: str, argv: Sequence[str | Path], ready: Check
        ) -> None:
            log = folder / f"{name}.log"
            process = await Process.start(name, argv, log=log, ready=ready, ready_s=PATIENCE_S)
            stack.push_async_callback(process.stop, _STOP_S)

        async def start_service(
            stack: AsyncExitStack, command: str, name: str, config: dict[str, Any], admin: str
        ) -> None:
            file = folder / f"{name}.json"  # JSON is YAML
            file.write_text(json.dumps(config).replace(_THERE, _HERE))
            argv = [sys.executable, "-m", "extproc", command, "--config", str(file)]
            await start(stack, name, argv, answers(f"http://{admin}/livez"))

        replicas = web.Application()
        replicas.router.add_get("/{path:.*}", _answer)
        runner = web.AppRunner(replicas, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        others.push_async_callback(runner.cleanup)
        for last in (101, 102):
            await web.TCPSite(runner, f"{_HERE}{last}", 8000).start()
        host = f"{_HERE}30"
        options = {
            "bind": host,
            "save": "",
            "appendonly": "no",
            "protected-mode": "no",
            "dir": folder,
        }
        await start(others, "redis", [redis_binary(), *flags(options)], listening(6379, host))
        redis = {"url": f"redis://{host}:6379/0"}
        poller = {"replicas": [FAST], "redis": redis, "poll": {"admin": f"{_HERE}40:9090"}}
        await start_service(others, "poll", "poller", poller, f"{_HERE}40:9090")
        configs = {**ROUTERS, "shared": {"state": "redis", "redis": redis}}
        records = {name: folder / "record" / name for name in ("plain", "rich", "strict", "policy")}
        admins = {name: f"{_HERE}{number}:9090" for number, name in enumerate(configs, 50)}
        simulated = f"--host {_HERE}103 --port 8000 --model tiny --profile llama-8b-h100"
        words = [sys.executable, "-m", "extproc", "simulate", *simulated.split()]
        words += ["--kv-tokens", str(KV_TOKENS)]
        await start(others, "simulate", words, answers(f"http://{_HERE}103:8000/health"))
        for name, config in configs.items():
            whole = _router_config(config, admins[name], records.get(name))
            await start_service(routers, "serve", name, whole, admins[name])
            await until(partial(_is_ready, name, admins[name]))
        shared = [Conversation("shared", each.name, each.steps) for each in CONVERSATIONS[:2]]
        texts["conversations.json"] = _json(await _converse([*CONVERSATIONS, *shared], admins))
        texts["decisions.json"] = _json({name: await _decisions(admins[name]) for name in records})
        pages = {name: admins[name] for name in ("plain", "rich", "shared")}
        texts["metrics.txt"] = "\n".join(
            [
                f"== {name}\n{_families(await _get(address, '/metrics'))}"
                for name, address in (pages | {"poller": f"{_HERE}40:9090"}).items()
            ]
        )
        await routers.aclose()
        texts["record.json"] = _json({name: _record(path) for name, path in records.items()})
    return texts


# -- processes ------------------------------------------------------------------------------


async def _answer(request: web.Request) -> web.Response:
    """Answer as a replica."""
    models = {"object": "list", "data": [{"id": "tiny", "max_model_len": 65536}]}
    bodies = {
        "/metrics": PAGE.read_bytes(),
        "/health": b"",
        "/v1/models": json.dumps(models).encode(),
        "/version": b'{"version": "0.32.0"}',
    }
    assert request.transport is not None
    if request.transport.get_extra_info("sockname")[0] == f"{_HERE}102":
        await asyncio.sleep(_LATER_S)
    body = bodies.get(request.path)
    return web.Response(body=body, status=404 if body is None else 200)


def _router_config(config: dict[str, Any], admin: str, record: Path | None) -> dict[str, Any]:
    listen = admin.replace(":9090", ":50051")
    return {
        "state": "memory",
        **config,
        "serve": {"listen": listen, "admin": admin, "drain_s": 1, **config.get("serve", {})},
        "route": {"seed": 1, **config.get("route", {})},
        "record": {"path": str(record) if record else None},
    }


async def _get(address: str, path: str) -> str:
    return (await get_text(f"http://{address}{path}") or "").replace(_HERE, _THERE)


async def _is_ready(name: str, admin: str) -> bool:
    if name in ("narrow", "hasty"):  # no request waits, or is refused, before speeds are measured
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
        url = f"http://{_HERE}103:8000/v1/completions"
        async with aiohttp.request("POST", url, json=body) as answer:
            await answer.read()
        return '"measured":true' in await _get(admin, "/fleet")
    healthy = (await _get(admin, "/fleet")).count('"healthy":true')
    ready = healthy == _REPLICAS.get(name, 2) and await _get(admin, "/readyz") == "ok\n"
    return ready or name == "empty"


def _help() -> str:
    pages = []
    for words in COMMANDS:
        text = io.StringIO()
        # A removed command names its replacement on stderr.
        with redirect_stdout(text), redirect_stderr(text), suppress(SystemExit):
            main([*words.split(), "--help"])
        pages.append(f"$ extproc {words} --help\n{text.getvalue()}")
    return "\n".join(pages)


# -- conversations --------------------------------------------------------------------------


async def _converse(conversations: list[Conversation], admins: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, admin in admins.items():
        async with grpc.aio.insecure_channel(admin.replace(":9090", ":50051")) as channel:
            begin = partial(channel.stream_stream(f"/{SERVICE}/Process"), timeout=PATIENCE_S)
            of_router = [each for each in conversations if each.router == name]
            found[name] = {each.name: await _messages(begin, each) for each in of_router}
    return found


async def _messages(begin: Any, conversation: Conversation) -> list[Any]:
    lines: list[Any] = []
    others = []
    for steps in conversation.beside:
        others.append(begin())
        for step in steps:
            await _exchange(others[-1], step)
    call = begin(metadata=[*conversation.metadata.items()])
    for step in conversation.steps:
        if step.message is OTHERS_END.message:
            lines.append("the others end")
            while others:
                await _last_replies(others.pop())
            lines += await _replies(call, step.replies)
            continue
        lines += await _exchange(call, step)
    lines += await _last_replies(call)
    for other in others:
        await _last_replies(other)
    return lines


async def _exchange(call: Any, step: ConversationStep) -> list[Any]:
    message = bytes(step.message)
    await call.write(message.replace(_THERE.encode(), _HERE.encode()))
    sent = {"send": _shown(ProcessingRequest.parse(message)), "bytes": _digest(message)}
    return [sent, *await _replies(call, step.replies)]


async def _last_replies(call: Any) -> list[Any]:
    """End the stream without a reset; return the router's last replies."""
    await call.done_writing()
    return await _replies(call, inf)


async def _replies(call: Any, most: float) -> list[Any]:
    found: list[Any] = []
    while len(found) < most and (reply := await call.read()) is not grpc.aio.EOF:
        found.append(_shown_reply(reply.replace(_HERE.encode(), _THERE.encode())))
    return found


def _shown_reply(reply: bytes) -> dict[str, Any]:
    """A reply as text and, if it contains no measured number, as bytes."""
    text = _shown(ProcessingResponse.parse(reply))
    fixed = _fixed(text)
    return {"reply": fixed} | ({"bytes": _digest(reply)} if fixed == text else {})


def _shown(value: Any) -> Any:
    """A message as JSON, without fields that are not set."""
    if type(value).__name__ == "Value":
        given = (_shown(getattr(value, field.name)) for field in fields(value))
        return next((item for item in given if item not in (None, {})), "")
    if type(value).__name__ in ("Struct", "ListValue"):
        return _shown(value.fields if hasattr(value, "fields") else value.values)
    if is_dataclass(value):
        listed = {field.name: getattr(value, field.name) for field in fields(value)}
        empty: tuple[Any, ...] = (None, "", b"", 0, False, [], {})
        return {
            name: _shown(item)
            for name, item in listed.items()
            if is_dataclass(item) or item not in empty
        }
    if isinstance(value, dict):
        return {name: _shown(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, bytes):
        text = value.decode("utf-8", "backslashreplace")
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:40]}… {_digest(value)}"
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _digest(data: bytes) -> str:
    return f"{len(data)} bytes, sha256 {sha256(data).hexdigest()[:16]}"


# -- what varies ----------------------------------------------------------------------------


def _fixed(value: Any, key: str = "") -> Any:
    """JSON in which measured numbers are replaced by their type."""
    if isinstance(value, dict):
        return {
            name: _fixed(item, f"{key}.{name}" if key in ("terms_s", "learned") else name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_fixed(item, key) for item in value]
    if isinstance(value, float) and _MEASURED.search(key):
        return "<measured>"
    if isinstance(value, str):
        value = re.sub(r'"created":\d{10}', '"created":<time>', value)
        return re.sub(r"\d+(\.\d+)? (s|ms|µs)\b", "<time>", value)
    return value


async def _decisions(admin: str) -> list[Any]:
    found: list[Any] = []
    while page := json.loads(await _get(admin, f"/decisions?after={len(found)}")):
        found += page
    return [_fixed(item) for item in found]


def _record(folder: Path) -> list[Any]:
    """Lines of a router's record, in the order of their kinds; a line for each replica."""
    lines = []
    for file in sorted(folder.glob("*.jsonl")):
        text = file.read_text().replace(_HERE, _THERE)
        lines += [json.loads(line) for line in text.splitlines() if line]
    found: dict[str, Any] = {}
    for number, line in enumerate(lines):
        name = line["id"] if line["kind"] == "replica" else f"{number:04}"
        found.setdefault(f"{line['kind']} {name}", _fixed(line))
    return [found[name] for name in sorted(found)]


def _families(page: str) -> str:
    """HELP and TYPE of each family, and the label sets of its samples."""
    shown: dict[str, None] = {}
    for line in page.splitlines():
        text = line if line.startswith("#") else line.rpartition(" ")[0]
        name = text.removeprefix("# HELP ").removeprefix("# TYPE ")
        if not name.startswith(_LIBRARY_FAMILIES):
            shown[re.sub('commit="[0-9a-f]*"', 'commit="<commit>"', text)] = None
    return "\n".join(shown) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"

"""Texts of the golden files, from processes: routers, a poller and replicas that never change."""

import io
import json
import os
import queue
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import urlopen

import grpc
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse

from extproc.cli import main
from extproc.lab.harness.processes import redis_binary
from tests.golden.conversations import (
    CONVERSATIONS,
    FAST,
    KV_TOKENS,
    OTHERS_END,
    ROUTERS,
    Conversation,
    ConversationStep,
)

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
_PATIENCE_S = 60.0
_REPLICAS = {"plain": 3, "policy": 1, "shared": 1}
"""Number of replicas in all pools of a router; by default 2."""
_LATER_S = 0.5
"""Delay of the slow replica: the order of the first answers breaks ties."""
_LONGEST_SHOWN = 600
"""Characters of a body."""
_MEASURED = re.compile(
    r"(_at|_s|_seconds|^at|^seconds|^score|^terms_s\.\w+|^stretch|^cost_weight|output_tokens$|^kv_pressure|^learned\.\w+)$"
)
"""Keys of measured times, and of figures computed from them."""
_LIBRARY_FAMILIES = ("python_", "process_")
"""Metric families of ``prometheus_client`` itself."""


class _ReplicaHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "tiny", "max_model_len": 65536}]}
        answers = {
            "/metrics": PAGE.read_bytes(),
            "/health": b"",
            "/v1/models": json.dumps(models).encode(),
            "/version": b'{"version": "0.32.0"}',
        }
        answer = answers.get(self.path)
        if self.connection.getsockname()[0] == f"{_HERE}102":
            time.sleep(_LATER_S)
        self.send_response(404 if answer is None else 200)
        self.send_header("content-length", str(len(answer or b"")))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the router has ended
            self.wfile.write(answer or b"")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def collect(folder: Path) -> dict[str, str]:
    """Return the text of each golden file; the processes use ``folder`` for their files."""
    texts = {"help.txt": _help()}
    with ExitStack() as stack:
        for last in (101, 102):
            stack.enter_context(_replica(f"{_HERE}{last}"))
        redis = f"redis://{_HERE}30:6379/0"
        stack.enter_context(_redis(f"{_HERE}30", folder))
        poller = {"replicas": [FAST], "redis": {"url": redis}, "poll": {"admin": f"{_HERE}40:9090"}}
        stack.enter_context(_extproc(folder, "poll", "poller", poller, f"{_HERE}40:9090"))
        routers = {**ROUTERS, "shared": {"state": "redis", "redis": {"url": redis}}}
        records = {name: folder / "record" / name for name in ("plain", "rich", "strict", "policy")}
        admins = {name: f"{_HERE}{number}:9090" for number, name in enumerate(routers, 50)}
        simulated = f"--host {_HERE}103 --port 8000 --model tiny --profile llama-8b-h100"
        words = [sys.executable, "-m", "extproc", "simulate", *simulated.split()]
        log = folder / "simulate.log"
        stack.enter_context(_process([*words, "--kv-tokens", str(KV_TOKENS)], log))
        _until(lambda: _get(f"{_HERE}103:8000", "/health", fails="no") == "")
        running = stack.enter_context(ExitStack())
        for name, config in routers.items():
            whole = _router_config(config, admins[name], records.get(name))
            running.enter_context(_extproc(folder, "serve", name, whole, admins[name]))
            _until(partial(_is_ready, name, admins[name]))
        shared = [Conversation("shared", each.name, each.steps) for each in CONVERSATIONS[:2]]
        texts["conversations.json"] = _json(_converse([*CONVERSATIONS, *shared], admins))
        texts["decisions.json"] = _json({name: _decisions(admins[name]) for name in records})
        pages = admins | {"poller": f"{_HERE}40:9090"}
        texts["metrics.txt"] = "\n".join(
            f"== {name}\n{_families(_get(address, '/metrics'))}"
            for name, address in pages.items()
            if name in ("plain", "rich", "shared", "poller")
        )
        running.close()
        texts["record.json"] = _json({name: _record(path) for name, path in records.items()})
    return texts


# -- processes ------------------------------------------------------------------------------


@contextmanager
def _replica(address: str) -> Iterator[None]:
    server = ThreadingHTTPServer((address, 8000), _ReplicaHandler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _redis(host: str, folder: Path) -> Iterator[None]:
    options = f"--bind {host} --port 6379 --appendonly no --protected-mode no --dir {folder}"
    command = [str(redis_binary()), *options.split(), "--save", ""]
    with _process(command, folder / "redis.log"):
        yield


@contextmanager
def _extproc(
    folder: Path, command: str, name: str, config: dict[str, Any], admin: str
) -> Iterator[None]:
    file = folder / f"{name}.json"  # JSON is YAML
    file.write_text(json.dumps(config).replace(_THERE, _HERE))
    words = [sys.executable, "-m", "extproc", command, "--config", str(file)]
    log = folder / f"{name}.log"
    with _process(words, log):
        try:
            _until(lambda: _get(admin, "/livez") == "ok\n")
        except TimeoutError:
            raise AssertionError(f"{command} {name} does not run:\n{log.read_text()}") from None
        yield


def _router_config(config: dict[str, Any], admin: str, record: Path | None) -> dict[str, Any]:
    listen = admin.replace(":9090", ":50051")
    return {
        "state": "memory",
        **config,
        "serve": {"listen": listen, "admin": admin, "drain_s": 1, **config.get("serve", {})},
        "route": {"seed": 1, **config.get("route", {})},
        "record": {"path": str(record) if record else None},
    }


def _environment() -> dict[str, str]:
    """Environment without settings of extproc."""
    inherited = {key: text for key, text in os.environ.items() if not key.startswith("EXTPROC_")}
    return inherited | {"COLUMNS": "100", "LINES": "40"}


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"a process is not ready after {_PATIENCE_S:g} s")
        time.sleep(0.1)


def _get(address: str, path: str, fails: str = "") -> str:
    try:
        with urlopen(f"http://{address}{path}", timeout=_PATIENCE_S) as answer:
            return str(answer.read().decode()).replace(_HERE, _THERE)
    except (URLError, ConnectionError):
        return fails


def _is_ready(name: str, admin: str) -> bool:
    if name in ("narrow", "hasty"):  # no request waits, or is refused, before speeds are measured
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
        data = json.dumps(body).encode()
        with urlopen(f"http://{_HERE}103:8000/v1/completions", data, _PATIENCE_S) as answer:
            answer.read()
        return '"measured":true' in _get(admin, "/fleet")
    healthy = _get(admin, "/fleet").count('"healthy":true')
    ready = healthy == _REPLICAS.get(name, 2) and _get(admin, "/readyz") == "ok\n"
    return ready or name == "empty"


def _help() -> str:
    pages = []
    with patch.dict(os.environ, _environment(), clear=True):
        for words in COMMANDS:
            text = io.StringIO()
            # A removed command names its replacement on stderr.
            with redirect_stdout(text), redirect_stderr(text), suppress(SystemExit):
                main([*words.split(), "--help"])
            pages.append(f"$ extproc {words} --help\n{text.getvalue()}")
    return "\n".join(pages)


# -- conversations --------------------------------------------------------------------------


def _converse(conversations: list[Conversation], admins: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, admin in admins.items():
        with grpc.insecure_channel(admin.replace(":9090", ":50051")) as channel:
            process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
            of_router = [each for each in conversations if each.router == name]
            found[name] = {each.name: _messages(process, each) for each in of_router}
    return found


class _Call:
    """Stream to a router, which ends without a reset."""

    def __init__(self, process: grpc.StreamStreamMultiCallable, metadata: dict[str, str]) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies = process(
            iter(self._messages.get, None), _PATIENCE_S, tuple(metadata.items())
        )

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def read(self) -> bytes:
        return _there(next(self._replies))

    def end(self) -> list[bytes]:
        """End the stream, and return the router's last replies."""
        self._messages.put(None)
        return [_there(reply) for reply in self._replies]


def _messages(process: grpc.StreamStreamMultiCallable, conversation: Conversation) -> list[Any]:
    lines: list[Any] = []
    others = []
    for steps in conversation.beside:
        others.append(_Call(process, {}))
        for step in steps:
            _exchange(others[-1], step)
    call = _Call(process, conversation.metadata)
    for step in conversation.steps:
        if step.message is OTHERS_END.message:
            lines.append("the others end")
            while others:
                others.pop().end()
            lines += [_shown_reply(call.read()) for _ in range(step.replies)]
            continue
        lines += _exchange(call, step)
    lines += [_shown_reply(reply) for reply in call.end()]
    for other in others:
        other.end()
    return lines


def _exchange(call: _Call, step: ConversationStep) -> list[Any]:
    message = bytes(step.message)
    call.send(message.replace(_THERE.encode(), _HERE.encode()))
    sent = {"send": _shown(ProcessingRequest.parse(message)), "bytes": _digest(message)}
    return [sent, *(_shown_reply(call.read()) for _ in range(step.replies))]


def _there(reply: bytes) -> bytes:
    return reply.replace(_HERE.encode(), _THERE.encode())


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


def _decisions(admin: str) -> list[Any]:
    found: list[Any] = []
    while page := json.loads(_get(admin, f"/decisions?after={len(found)}")):
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

"""``extproc explain`` prints decisions and comparisons, and says why if it cannot."""

import asyncio
import json
import re
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs, to_builtins
from prometheus_client import CollectorRegistry

from extproc.config import AdminSettings, Config
from extproc.ground.text import figure
from extproc.lab.harness.processes import free_port
from extproc.observe import client
from extproc.observe.admin import serve_admin
from extproc.predict.inputs import Excluded
from extproc.proxy.app import build
from extproc.proxy.services import Services
from tests.certificates import Authority
from tests.fakes import ManualClock, chat, embedding, replica, state
from tests.observe.conftest import Run, decide, serving

ID = "0f3c2e9a-6f1d-4c0e-9d0a-3a5b7c9d1e2f"


@pytest.fixture
def services() -> Services:
    made = build(Config.model_validate({"route": {"seed": 1}}), CollectorRegistry())
    for number, profile in enumerate(("llama-8b-h100", "llama-8b-a10"), start=1):
        made.fleet.put(state(number, profile, ManualClock()))
    return made


@pytest.fixture
def explain(run: Run) -> Run:
    async def explain(*arguments: str, status: int = 0) -> list[str]:
        lines = await run("explain", *arguments, status=status)
        assert status or "--json" in arguments or all(len(line) <= 120 for line in lines)
        return lines

    return explain


@pytest.fixture
def show(router: str, explain: Run) -> Run:
    return partial(explain, "--router", router)


def joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def candidates(lines: list[str]) -> tuple[list[dict[str, str]], list[str]]:
    at = next(number for number, line in enumerate(lines) if "prefill" in line)
    names = lines[at].split()
    rows = [line.lstrip("> ").split() for line in lines[at + 1 : at + 3]]
    return [dict(zip(names, row, strict=True)) for row in rows], lines[at + 3 :]


async def test_last_decisions_are_a_table(services: Services, show: Run) -> None:
    for number in range(3):
        outcome = decide(services, chat(100, 50), f"request-{number}").outcome
    outcome.served_by, outcome.status, outcome.completion_s = replica(1), 200, 0.375
    header, _, *lines = await show("--last", "2")
    rows = [line for line in lines if line[2] == ":"]
    assert header.split()[:3] == ["time", "request", "replica"]
    assert [row.split()[1] for row in rows] == ["request-1", "request-2"]
    row = rows[-1]
    assert re.match(r"\d\d:\d\d:\d\d  request-2  r1 +100 +4\d +0.010 +- +0.3\d\d +0.375$", row)
    assert row.index("r1") == header.index("replica")
    assert len(row) == len(header)
    assert lines[lines.index(row) + 1].strip().startswith("llama: r1 finishes it in 0.3")


@pytest.mark.parametrize("streamed", [True, False])
async def test_request_shows_all_candidates_with_terms_that_add_up(
    services: Services, router: str, explain: Run, streamed: bool
) -> None:
    services.fleet.first_token(services.fleet.dispatch(replica(1), chat(1000, 10)))
    record = decide(services, replace(chat(1234, 50), stream=streamed), ID)
    outcome = record.outcome
    outcome.served_by, outcome.status = replica(1), 200
    outcome.ttft_s, outcome.completion_s, outcome.output_tokens = 0.062, 0.41, 49
    lines = await explain("--router", f"http://{router}/", ID)
    text = joined(lines)
    assert lines[0] == f"request   {ID}"
    for words in (
        "model llama, streamed, 1234 prompt tokens" if streamed else "model llama, 1234 prompt",
        "output tokens expected of at most 50",
        "chosen r1 (10.0.0.1:8000); for a retry r2 (10.0.0.2:8000)",
        "why r1 finishes it in",
        "first token after 0.062 s (predicted 0.053 s), finished after 0.410 s",
        "49 output tokens",
    ):
        assert words in text
    assert [line[:5] for line in lines if line[3:5] in ("r1", "r2")] == [">  r1", "   r2"]
    predictions = record.decision.prediction.completion
    first_token = re.search(r"score = finish( \+ (\S+) \* TTFT)? \+ weight \* others\.", text)
    assert first_token
    assert (first_token[1] is not None) == streamed
    for cells, predicted in zip(candidates(lines)[0], predictions, strict=True):
        ttft = sum(float(cells[name]) for name in ("admit", "prefill"))
        assert float(cells["TTFT"]) == pytest.approx(ttft, abs=0.002)
        assert float(cells["finish"]) == pytest.approx(ttft + float(cells["decode"]), abs=0.003)
        assert float(cells["finish"]) == pytest.approx(predicted, abs=0.01)
        lost = float(cells["weight"].rstrip("%")) / 100 * float(cells["others"])
        score = predicted + float(first_token[2] or 0) * ttft + lost
        assert float(cells["score"]) == pytest.approx(score, abs=0.01)


async def test_observed_request_shows_predictions_for_both_choices(
    services: Services, show: Run
) -> None:
    record = decide(services, chat(1234, 50), ID, observed=True)
    assert record.decision.replica == replica(1)
    outcome = record.outcome
    outcome.served_by, outcome.status, outcome.completion_s = replica(2), 200, 1.5
    here, there = record.decision.prediction.completion.tolist()
    text = joined(await show(ID))
    assert "chosen r1 (10.0.0.1:8000); observed only: Envoy chose by itself" in text
    finished = f"finished after 1.500 s (predicted {figure(there)} s, {figure(here)} s on r1)"
    assert f"served by r2 (10.0.0.2:8000) with status 200, {finished}" in text
    assert "[Envoy chose r2]" in joined(await show())


async def test_stretch_is_shown_where_predictions_were_off(services: Services, show: Run) -> None:
    decide(services, chat(100, 50), "before")
    assert not any("×" in line for line in await show("before"))
    for _ in range(20):
        services.fleet.speeds.learn_decode(replica(1), 1.0, 1.5)
    services.fleet.put(next(iter(services.fleet.members)))
    stretch = decide(services, chat(100, 50), "after").decision.situation.view.stretch[0]
    (first, second), legend = candidates(await show("after"))
    assert stretch > 1.2
    assert (first["×"], second["×"]) == (f"{stretch:.2f}", "1.00")
    assert any(line.startswith("×: actual ÷ predicted decode time") for line in legend)


async def test_adapter_terms_are_shown_for_its_requests(services: Services, show: Run) -> None:
    for number in (1, 2):
        served = state(number, "llama-8b-h100", ManualClock(), models=("llama", "law"))
        update = {"adapters": ("law",), "max_loras": 1}
        services.fleet.put(structs.replace(served, **update))
    ticket = services.fleet.dispatch(replica(2), replace(chat(100, 50), model="law"))
    decide(services, chat(100, 50), "plain")
    assert not any("adapter" in line for line in await show("plain"))
    decision = decide(services, replace(chat(100, 5), model="law"), "adapted").decision
    services.fleet.release(ticket)
    (first, second), legend = candidates(await show("adapted"))
    assert (first["replica"], first["adapter"]) == ("r2", "0.000")
    assert (second["replica"], second["adapter"]) == ("r1", "0.100")
    assert "wasted" in second
    terms = sum(float(second[name]) for name in ("admit", "adapter", "prefill"))
    assert float(second["TTFT"]) == pytest.approx(terms, abs=0.002)
    assert decision.predicted_ttft < 0.1
    assert any(line.startswith("adapter: wait for a slot of the LoRA") for line in legend)


async def test_excluded_replicas_are_listed_with_the_reason(services: Services, show: Run) -> None:
    decide(services, chat(10), ID).decision.situation.view.excluded = (
        Excluded(replica(3), "r3", "the last poll failed: connection refused"),
        Excluded(replica(4), "a-longer-name", "does not serve llama"),
    )
    assert (await show(ID))[-3:] == [
        "excluded",
        "r3             the last poll failed: connection refused",
        "a-longer-name  does not serve llama",
    ]


async def test_long_name_of_an_excluded_replica_is_apart_from_the_reason(
    services: Services, show: Run
) -> None:
    pod = "vllm-llama-8b-instruct-deployment-7d9f8b6c5d-x2x4z"
    decision = decide(services, chat(10), ID).decision
    decision.situation.view.excluded = (Excluded(replica(3), pod, "draining"),)
    assert (await show(ID))[-1] == f"{pod}  draining"


async def test_json_is_the_answer_of_the_router(services: Services, show: Run) -> None:
    record = to_builtins(decide(services, chat(10), ID).record())
    for arguments in ((ID,), ()):
        assert json.loads("\n".join(await show("--json", *arguments))) == [record]


async def test_more_decisions_than_a_page_are_read(services: Services, show: Run) -> None:
    for number in range(1, 131):
        decide(services, chat(10), f"request-{number}")
    for last, shown in ((120, 120), (50, 50), (51, 51), (500, 130)):
        records = json.loads("\n".join(await show("--json", "--last", str(last))))
        assert [record["number"] for record in records] == list(range(131 - shown, 131))


WAITED = {"queued_s": 3.2, "queue_reason": "r1 would have needed 98% of its KV cache"}
REASON = "waited 3.200 s at the router: r1 would have needed 98% of its KV cache"


@pytest.mark.parametrize(
    ("requested", "outcome", "remark", "words"),
    [
        ("chat", {}, "", "model chat (served as llama), 10 prompt tokens"),
        ("", {"served_by": replica(2), "status": 503}, "[served by r2, answered with status 503]",
         "served by r2 (10.0.0.2:8000) with status 503"),
        ("", WAITED, f"[{REASON}]",
         f"happened {REASON}, no response yet, or the router did not see it"),
        ("", {"status": 503}, "[answered with status 503]",
         "happened answered with status 503, by no known replica"),
        ("", WAITED | {"served_by": replica(1), "status": 200}, f"[{REASON}]",
         f"happened {REASON}, served by r1 (10.0.0.1:8000) with status 200"),
    ],
)  # fmt: skip
async def test_alias_and_outcome_are_shown(
    services: Services, show: Run, requested: str, outcome: dict[str, Any], remark: str, words: str
) -> None:
    decide(services, chat(10), "other")
    record = decide(services, replace(chat(10), requested_model=requested), ID)
    for name, value in outcome.items():
        setattr(record.outcome, name, value)
    listed = joined(await show())
    assert listed.endswith(remark)
    assert listed.count(" [") == bool(remark)
    assert words in joined(await show(ID))


async def test_control_characters_of_clients_are_not_printed(services: Services, show: Run) -> None:
    profile = replace(chat(10), model="\x1b[31m" + "long/name " * 30)
    decide(services, profile, "i" * 128)
    decide(services, replace(embedding(10), stream=True), "")
    for arguments in ((), ("i" * 128,)):
        assert any("?[31m" in line for line in await show(*arguments))


async def test_long_names_of_a_large_fleet_are_shortened(services: Services, show: Run) -> None:
    for number in range(3, 60):
        name = f"a-long-name-in-some-namespace-{number}"
        services.fleet.put(state(number, "llama-8b-a10", ManualClock(), name=name))
    for _ in range(300):
        services.fleet.dispatch(replica(2), chat(100_000, 5000))
        services.fleet.speeds.learn_decode(replica(2), 1.0, 3.0)
    services.fleet.put(state(2, "llama-8b-a10", ManualClock()))
    decide(services, chat(10_000), ID)
    lines = await show(ID)
    assert sum(bool(re.match(r"[> ]  \.\.\.\S+-\d+ ", line)) for line in lines) == 57


async def test_unknown_request_is_an_error_of_one_line(router: str, show: Run) -> None:
    (line,) = await show("nobody", status=1)
    reason = f"no decision about request 'nobody' at http://{router}: "
    assert line.startswith(f"extproc explain: {reason}")


@pytest.mark.parametrize("command", ["explain", "top"])
async def test_hung_router_is_an_error_of_its_own(
    run: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (line,) = await run(command, "--router", address, status=1)
    accepts = f"the router at http://{address} accepts connections, but does not answer; if its"
    assert line.startswith(f"extproc {command}: {accepts}")


async def test_page_that_does_not_end_is_an_error_of_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[")

    monkeypatch.setattr(client, "_WHOLE_S", 0.2)
    async with await asyncio.start_server(begin, "127.0.0.1") as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        (line,) = await run("explain", "--router", address, status=1)
    assert ": no whole answer within 0.2 s: check that a router runs" in line


@pytest.mark.parametrize("command", ["explain", "top"])
async def test_missing_router_is_an_error_of_one_line(run: Run, command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    (line,) = await run(command, "--router", address, status=1)
    refused = f"no router answers at http://{address}: connection refused: check that a router"
    assert line.startswith(f"extproc {command}: {refused}")
    (line,) = await run(command, "--router", "router.invalid:9090", status=1)
    unknown = (
        "no router answers at http://router.invalid:9090: Cannot connect to host router.invalid"
    )
    assert line.startswith(f"extproc {command}: {unknown}")
    (line,) = await run(command, "--router", f"https://{address}", status=1)
    assert f"no router answers at https://{address}: connection refused: check" in line
    (line,) = await run(command, "--router", "http://", status=1)
    assert "no router answers at http:: this is no URL: check" in line
    async with serve_admin("127.0.0.1:0", CollectorRegistry()) as poller:
        (line,) = await run(command, "--router", poller, status=1)
        assert "is not the admin address (serve.admin) of a router: it answers status 404" in line


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<html>", "no list of decisions (JSON is malformed: invalid character (byte 0))"),
        ("[", "no list of decisions (Input data was truncated)"),
        ("{}", "no list of decisions (Expected `array`, got `object`)"),
        ("[{}]", "no list of decisions (Object missing required field `number` - at `$[0]`)"),
        (
            '[{"number": "1"}]',
            "if the router has another version, run the 'extproc explain' of that",
        ),
    ],
)
async def test_server_that_is_no_router_is_an_error_of_one_line(
    explain: Run, body: str, problem: str
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body)

    routes = [web.get("/decisions", answer)]
    async with serve_admin("127.0.0.1:0", CollectorRegistry(), routes) as address:
        (line,) = await explain("--router", address, status=1)
    assert problem in line


@pytest.mark.parametrize("command", ["explain", "top"])
async def test_grpc_port_of_a_router_is_told_from_its_admin_port(run: Run, command: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\4\0\0\0\0\0")  # HTTP/2: settings
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        (line,) = await run(command, "--router", f"{host}:{port}", status=1)
    assert "it answers no HTTP/1.1, like the gRPC of serve.listen" in line


@pytest.mark.parametrize("command", ["explain", "top"])
async def test_proxy_that_only_redirects_is_an_error_of_one_line(run: Run, command: str) -> None:
    async def login(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.path)

    routes = [web.get("/{path:.*}", login)]
    async with serve_admin("127.0.0.1:0", CollectorRegistry(), routes) as address:
        (line,) = await run(command, "--router", address, status=1)
    assert f"no router answers at http://{address}: too many redirects: check that a" in line


async def test_router_comes_from_file_or_environment(
    router: str, explain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "extproc.yaml"
    file.write_text(f"state: memory\nserve: {{admin: '{router}'}}")
    assert await explain("--config", str(file)) == ["no decisions yet"]
    monkeypatch.setenv("EXTPROC_STATE", "memory")
    monkeypatch.setenv("EXTPROC_SERVE__ADMIN", router)
    assert await explain() == ["no decisions yet"]
    monkeypatch.setenv("EXTPROC_SERVE__ADMIN", "nowhere")
    (line,) = await explain(status=2)
    assert "serve.admin" in line


@pytest.mark.parametrize("command", ["explain", "top"])
async def test_token_and_certificate_come_from_the_settings(
    services: Services, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    decide(services, chat(10), ID)
    cert, key = Authority(tmp_path / "authority").sign("router")
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("an-example")
    other.write_text("another")
    access = {"tls_cert": cert, "tls_key": key, "token_file": token}
    async with serving(services, AdminSettings.model_validate(access)) as address:
        for name, file in access.items():
            monkeypatch.setenv(f"EXTPROC_ADMIN__{name.upper()}", str(file))
        monkeypatch.setenv("EXTPROC_SERVE__ADMIN", address)
        monkeypatch.setenv("EXTPROC_STATE", "memory")
        assert any(ID in line for line in await run(command))
        monkeypatch.setenv("EXTPROC_ADMIN__TOKEN_FILE", str(other))
        (error,) = await run(command, status=1)
        assert error.endswith("needs another token (admin.token_file)")
        other.unlink()
        (error,) = await run(command, status=1)
        assert f"admin.token_file: {other}: No such file" in error
        monkeypatch.setenv("EXTPROC_ADMIN__TLS_CERT", str(other))
        monkeypatch.setenv("EXTPROC_ADMIN__TOKEN_FILE", str(token))
        (error,) = await run(command, status=1)
        assert f"{other}: No such file" in error

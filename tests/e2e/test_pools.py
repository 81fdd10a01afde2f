"""Pools behind one Envoy: of several models, contexts, adapters, caches, or of one replica."""

import asyncio
import json
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import Bootstrap, endpoints, manager_of
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.request.objective import FAIRNESS_ID, OBJECTIVE, TARGETS
from tests.e2e.client import CHAT, MESSAGES, Answer, Client
from tests.e2e.stack import Stack, ext_proc_of, replicas
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

A10, H100 = "llama-8b-a10", "llama-8b-h100"
SETTINGS: dict[str, dict[str, object]] = {
    "hold": {
        "allow_inference_headers": True,
        "empty_s": 10,  # longer than the 5 s after which a request tries one that is not healthy
        "objectives": {
            "soon": {"priority": 1, "sheddable": True},
            "batch": {"priority": -1, "tenants": ["night"]},
        },
    },
    "serve": {"chunks_per_s": 1e6},
}
ADAPTERS, UNLOADED = ("law", "code"), "tax"
UNIT = 64  # tokens of a prompt that are cached together
WORDS = "sea " * 10_000
PROMPT_TOKENS = 30_000
OTHER = "qwen-7b"
LOAD_S = 0.5  # seconds that an adapter takes to load
_TELLS = "--enable-prompt-tokens-details"
_UNCACHED = "--no-enable-prefix-caching"
_LORA = ("--lora-modules", "law", "code", "tax", "--max-loras", "1")
_LOADING = (*_LORA, "--lora-load-seconds", str(LOAD_S))
POOLS = {
    "default": (
        SimulatedReplica("llama", A10),
        SimulatedReplica("qwen", A10, ("--model", OTHER)),
    ),
    "second": (SimulatedReplica("second-1", A10), SimulatedReplica("second-2", A10)),
    "contexts": (
        SimulatedReplica("short", H100, ("--max-model-len", "4096")),
        SimulatedReplica("long", A10),
    ),
    "adapters": (
        SimulatedReplica("lora-1", H100, _LOADING),
        SimulatedReplica("lora-2", H100, _LOADING),
    ),
    "prefixes": (
        SimulatedReplica("cached-1", H100, (_TELLS,)),
        SimulatedReplica("cached-2", H100, (_TELLS,)),
        SimulatedReplica("cached-3", H100, (_TELLS,)),
        SimulatedReplica("off", H100, (_TELLS, _UNCACHED, "--model", "x")),
        SimulatedReplica("silent", H100, ("--model", "y")),
    ),
    "alone": (SimulatedReplica("alone", A10),),
    "narrow": (SimulatedReplica("narrow-1", H100), SimulatedReplica("narrow-2", H100)),
}
LOST = "lost"
"""A route names this pool, which is not configured; its cluster is the one of ``second``."""


class Pools(Stack):
    """The pools above behind one Envoy: a pool's host is its name with ``.example``; the default
    pool serves other hosts, and ``second`` the paths below ``/batch/``. To ``narrow`` Envoy lets
    one request at a time, and it tells the router the headers that ``extproc check`` asks for."""

    def __init__(self, directory: Path) -> None:
        fleet = tuple(chain.from_iterable(POOLS.values()))
        super().__init__(directory, fleet, SETTINGS)

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        by_name = {one["name"]: one for one in whole["replicas"]}
        pools = {
            name: {"replicas": [by_name[one.name] for one in fleet]}
            for name, fleet in POOLS.items()
        }
        return {**whole, **pools.pop("default"), "pools": pools}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        assert self.missing(bootstrap) == {"headers_come_with_body"}
        told = [f"request.headers['{name}']" for name in (*OBJECTIVE, *FAIRNESS_ID, *TARGETS)]
        ext_proc_of(bootstrap)["request_attributes"] += told
        assert not self.missing(bootstrap)
        clusters = bootstrap["static_resources"]["clusters"]
        default = next(one for one in clusters if one["name"] == "replicas")
        hosts = manager_of(bootstrap)["route_config"]["virtual_hosts"]
        for name, fleet in POOLS.items():
            members = endpoints([self.address(one.name) for one in fleet])
            if name == "default":
                default["load_assignment"]["endpoints"] = members
                continue
            clusters.append(deepcopy(default) | {"name": name})
            clusters[-1]["load_assignment"] |= {"endpoints": members}
            hosts.append(_host(hosts[0], name, name))
            if name == "narrow":
                clusters[-1]["circuit_breakers"]["thresholds"][0]["max_requests"] = 1
        hosts.append(_host(hosts[0], LOST, "second"))
        hosts[0]["routes"].insert(0, _by_prefix(hosts[1]))
        return bootstrap

    @staticmethod
    def missing(bootstrap: object) -> set[str]:
        found = check_envoy(bootstrap, Config.model_validate(SETTINGS))
        return {one.rule for one in found if one.level is Level.ERROR}


def _host(pattern: dict[str, Any], pool: str, cluster: str) -> dict[str, Any]:
    host = deepcopy(pattern) | {"name": pool, "domains": [f"{pool}.example"]}
    for route in host["routes"]:
        route["route"]["cluster"] = cluster
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    metadata = [{"key": "x-extproc-pool", "value": pool}]
    overrides = {"@type": kind, "overrides": {"grpc_initial_metadata": metadata}}
    host["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": overrides}
    return host


def _by_prefix(host: dict[str, Any]) -> dict[str, Any]:
    """As docs/configuration.md has it: the filter sees the path before it is rewritten."""
    route = host["routes"][-1]["route"] | {"prefix_rewrite": "/"}
    metadata = host["typed_per_filter_config"]
    return {"match": {"prefix": "/batch/"}, "route": route, "typed_per_filter_config": metadata}


def system(directory: Path) -> Stack:
    return Pools(directory)


@pytest.mark.parametrize(("model", "replica"), [(MODEL, "llama"), (OTHER, "qwen")])
async def test_model_goes_where_it_is_served(client: Client, model: str, replica: str) -> None:
    await until_read(lambda: client.replica(replica), lambda now: model in now["models"])
    for _ in range(4):
        answer = await client.chat(model=model)
        assert answer.status == 200
        assert (answer.decision["pool"], answer.decision["replica_name"]) == ("default", replica)
        (left_out,) = answer.decision["excluded"]
        assert left_out["why"] == f"does not serve {model!r}"


async def test_route_names_pool(client: Client) -> None:
    for _ in range(4):
        answer = await client.chat(headers={"host": "second.example"})
        assert answer.status == 200
        decision = answer.decision
        assert decision["pool"] == "second"
        assert decision["outcome"]["served_by"] == decision["replica"]
        assert {one["name"] for one in decision["candidates"]} == {"second-1", "second-2"}


async def test_prefix_that_route_takes_off_names_pool(client: Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    answer = await client.request("POST", f"/batch{CHAT}", body)
    assert answer.status == 200
    decision = answer.decision
    assert (decision["pool"], decision["endpoint"]) == ("second", CHAT)
    assert decision["outcome"]["served_by"] == decision["replica"]


async def test_no_client_chooses_the_pool(client: Client) -> None:
    answer = await client.chat(headers={"x-extproc-pool": "second"})
    assert answer.decision["pool"] == "default"
    answer = await client.chat(headers={"host": "second.example", "x-extproc-pool": "default"})
    assert answer.decision["pool"] == "second"


async def test_unknown_pool_is_logged_once_and_served(client: Client, stack: Stack) -> None:
    for _ in range(3):
        answer = await client.chat(headers={"host": f"{LOST}.example"})
        assert (answer.status, answer.decisions) == (200, [])
    log = stack.process("router").log.read_text()
    (line,) = (line for line in log.splitlines() if "names a pool that is not configured" in line)
    assert LOST in line
    assert ", ".join(POOLS) in line


async def test_fleet_page_shows_every_pool(client: Client) -> None:
    await client.ledger_empty()
    shown = {one["name"]: one["pool"] for one in (await client.fleet())["replicas"]}
    assert shown == {one.name: pool for pool, fleet in POOLS.items() for one in fleet}


async def test_command_lists_one_pool(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert await replicas(stack, "list", "--pool", "second", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["second-1", "second-2"]
    assert await replicas(stack, "list", "--pool", "secnd") == 2
    assert "no pool 'secnd' is configured; did you mean 'second'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": WORDS}], "n": 4, "max_tokens": 4}),
        ("/v1/completions", {"prompt": ["sea"] * 9 + [WORDS], "max_tokens": 4}),
        ("/v1/embeddings", {"input": [WORDS, "sea"]}),
        ("/v1/rerank", {"query": "sea", "documents": ["sea", WORDS]}),
    ],
)
async def test_each_prompt_fits_its_replica(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    answer = await client.of("contexts").request("POST", path, {"model": MODEL} | body)
    assert answer.status == 200
    assert (answer.decision["replica_name"], answer.decision["second"]) == ("long", None)


async def test_short_prompts_go_to_faster_replica(client: Client) -> None:
    body = {"model": MODEL, "prompt": ["sea " * 1_000] * 10, "max_tokens": 4}
    answer = await client.of("contexts").request("POST", "/v1/completions", body)
    assert (answer.status, answer.decision["replica_name"]) == (200, "short")


@pytest.mark.parametrize("header", OBJECTIVE)
async def test_header_names_objective(client: Client, header: str) -> None:
    answer = await client.of("second").chat(headers={header: "soon"})
    assert (answer.status, answer.decision["objective"]) == (200, "soon")


@pytest.mark.parametrize("header", FAIRNESS_ID)
async def test_header_names_tenant(client: Client, header: str) -> None:
    answer = await client.of("second").chat(headers={header: "night"})
    assert (answer.status, answer.decision["objective"]) == (200, "batch")


@pytest.mark.parametrize("header", TARGETS)
async def test_header_sets_target_that_is_met_or_refused(client: Client, header: str) -> None:
    client = client.of("second")
    objective = {"x-llm-d-inference-objective": "soon"}
    answer = await client.chat(headers={header: "60000", **objective})
    assert (answer.status, answer.decision["policy"]) == (200, "target")
    answer = await client.chat(headers={header: "0.001", **objective})
    assert (answer.status, answer.decisions) == (429, [])
    assert json.loads(answer.body)["error"]["code"] == "too_late"
    assert int(answer.headers["Retry-After"]) >= 1


async def ask_adapter(client: Client, model: str, tokens: int = 8) -> dict[str, Any]:
    """The decision for a streamed request, known to be short: a replica that is measured a little
    faster makes up for no load."""
    return (await client.chat(tokens, model=model, stream=True, max_tokens=tokens)).decision


def terms(decision: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["terms_s"]["adapter"] for one in decision["candidates"]}


async def homes(client: Client) -> dict[str, str]:
    found: dict[str, str] = {}

    async def settled() -> bool:
        decisions = {name: await ask_adapter(client, name) for name in ADAPTERS}
        found.update({name: decision["replica_name"] for name, decision in decisions.items()})
        loads = [sorted(terms(decision).values()) for decision in decisions.values()]
        return all(here == 0.0 < there for here, there in loads) and len({*found.values()}) == 2

    await until(settled)
    return found


async def test_adapter_keeps_to_its_replica_and_load_elsewhere_is_known(client: Client) -> None:
    client = client.of("adapters")
    for _ in range(5):
        for name in (*ADAPTERS, UNLOADED):  # one more than two replicas keep loaded
            await ask_adapter(client, name)
    where = await homes(client)
    for _ in range(3):
        for name in ADAPTERS:
            decision = await ask_adapter(client, name)
            assert decision["replica_name"] == where[name]
            assert decision["outcome"]["status"] == 200
            (elsewhere,) = [s for one, s in terms(decision).items() if one != where[name]]
            assert elsewhere > 0.5 * LOAD_S, "it was 0.1 s before any was seen"
    plain = await ask_adapter(client, MODEL)
    assert set(terms(plain).values()) == {0.0}


async def test_request_whose_adapter_would_wait_goes_elsewhere(client: Client) -> None:
    client = client.of("adapters")
    await homes(client)
    long = client.chat(model="code", stream=True, max_tokens=20_000, ignore_eos=True)
    stream = asyncio.create_task(long)
    taken = await client.busy()  # where it was worth a load: one may be measured a little faster
    (free,) = {"lora-1", "lora-2"} - {taken}
    for decision in [await ask_adapter(client, "law") for _ in range(2)]:
        assert decision["replica_name"] == free
        assert terms(decision)[taken] > 2 * LOAD_S, "until the long answer has ended"
    assert terms(decision)[free] == 0.0, "the first one had it loaded at the latest"
    stream.cancel()
    await asyncio.wait([stream])
    await client.ledger_empty()


Messages = list[dict[str, str]]


def begun(topic: str, words: int = 3000) -> Messages:
    return [
        {"role": "system", "content": "You are a patient guide. " * 100},
        {"role": "user", "content": f"Tell me of the {topic}. " + f"{topic} " * words},
    ]


async def turn(
    client: Client, messages: Messages, tokens: int = 40, model: str = MODEL
) -> tuple[Answer, Messages]:
    """Next answer of a conversation, and the conversation after it. Its bound says that the answer
    is short, so that a replica measured a little faster makes up for no prompt."""
    answer = await client.of("prefixes").chat(
        tokens, messages=messages, model=model, max_tokens=tokens
    )
    assert answer.status == 200
    said = json.loads(answer.body)["choices"][0]["message"]["content"]
    following = {"role": "user", "content": "And then? " * 20}
    return answer, [*messages, {"role": "assistant", "content": said}, following]


def hits(answer: Answer) -> tuple[float, int]:
    return answer.decision["expected_cached_tokens"], answer.decision["outcome"]["cached_tokens"]


async def test_each_conversation_stays_where_its_prompt_is(client: Client) -> None:
    for topic in ("sea", "sky", "hills"):
        messages, served = begun(topic), set()
        for number in range(4):
            answer, messages = await turn(client, messages)
            served.add(answer.decision["replica"])
            expected, reported = hits(answer)
            prompt = answer.decision["outcome"]["prompt_tokens"]
            assert expected == pytest.approx(reported, abs=0.05 * prompt)
            if number:
                assert reported > 0.9 * (prompt - 2 * UNIT)
                assert "cached" in answer.decision["why"]
        assert len(served) == 1


async def test_answer_is_cached_where_it_was_given(client: Client) -> None:
    answer, messages = await turn(client, begun("moon"), tokens=600)
    answer, _ = await turn(client, messages, tokens=2)
    expected, reported = hits(answer)
    asked = answer.decision["outcome"]["prompt_tokens"]
    assert min(expected, reported) > asked - 3 * UNIT


async def test_replica_without_prefix_cache_is_expected_to_find_nothing(client: Client) -> None:
    for number in range(2):
        answer, _ = await turn(client, begun("rain"), tokens=2, model="x")
        assert hits(answer) == (0, 0), number


async def test_replica_that_reports_no_cached_tokens_is_predicted(client: Client) -> None:
    for number in range(3):
        answer, _ = await turn(client, begun("snow"), tokens=2, model="y")
        expected, reported = hits(answer)
        assert reported is None
        assert (expected > 0) == (number > 0)


async def test_conversation_leaves_when_waiting_costs_more(client: Client) -> None:
    """Long answers fill the replica that has the prompt; others prefill it anew, at once."""
    wind = client.of("prefixes")
    answer, messages = await turn(client, begun("wind", words=300), tokens=2)
    home = answer.decision["replica"]
    answer, messages = await turn(client, messages, tokens=2)
    assert answer.decision["replica"] == home
    asked = [
        asyncio.create_task(wind.chat(messages=messages, max_tokens=2000, ignore_eos=True))
        for _ in range(60)
    ]
    await client.has_in_flight(len(asked))
    await client.slow(0.05)
    answers = await asyncio.gather(*asked)
    await client.slow(1.0)
    assert {one.status for one in answers} == {200}
    assert len({one.decision["replica"] for one in answers}) > 1


async def opened(client: Client, name: str) -> aiohttp.ClientResponse:
    """Sends a long prompt; returns when the stream has opened."""
    text = name + "word" * PROMPT_TOKENS
    body = {"model": MODEL, "input": text, "max_output_tokens": 2, "stream": True}
    response = await client._session.post(
        client._stack.url + "/v1/responses",
        data=json.dumps(body),
        headers={"host": "alone.example", "content-type": "application/json", "x-request-id": name},
    )
    assert response.status == 200
    seen = b""
    while b"event: response.in_progress" not in seen:
        seen += await response.content.readany()
    assert b"response.output_item" not in seen
    return response


async def test_opened_responses_stream_leaves_prompt_in_backlog(client: Client) -> None:
    responses = await asyncio.gather(*[opened(client, f"prompt {number}") for number in range(8)])
    responses.append(await opened(client, "the next"))
    (decision,) = await client.decisions("the next")
    for response in responses:
        response.close()
    assert decision["candidates"][0]["backlog_tokens"] > 5 * PROMPT_TOKENS  # one takes 8 s
    await client.ledger_empty()


async def test_first_token_of_responses_stream_comes_with_its_text(client: Client) -> None:
    body = {"model": MODEL, "input": "word" * 20_000, "max_output_tokens": 1, "stream": True}
    answer = await client.of("alone").request("POST", "/v1/responses", body)
    outcome = answer.decision["outcome"]
    # A prefill of 20,000 tokens takes five seconds on this card; the token ends the answer.
    assert outcome["ttft_s"] > 0.5 * outcome["completion_s"]


async def test_full_circuit_breaker_excludes_no_replica(client: Client) -> None:
    narrow = client.of("narrow")
    long = asyncio.create_task(narrow.chat(tokens=20_000))

    async def at_a_replica() -> bool:
        return sum([await client.load(one.name) for one in POOLS["narrow"]]) == 1

    await until(at_a_replica)  # the router knows of it before Envoy sends it
    refused = [await narrow.chat(tokens=1) for _ in range(5)]
    assert [answer.status for answer in refused] == [503] * 5
    assert all(answer.decision["excluded"] == [] for answer in refused)
    await client.slow(0.01)
    assert (await long).status == 200
    await client.slow(1.0)


async def test_model_whose_replicas_are_down_is_not_unknown(client: Client, stack: Stack) -> None:
    assert (await client.chat()).decision["replica_name"] == "llama"
    await stack.kill("llama")
    await until_read(lambda: client.replica("llama"), lambda now: not now["healthy"])
    for answer in await asyncio.gather(*(client.chat() for _ in range(4))):
        assert answer.status == 503, "another model's replica answers 404, and nobody tries again"
        assert answer.headers["Retry-After"] == "1"
        assert json.loads(answer.body)["error"]["type"] == "service_unavailable_error"
        assert (await client.chat(model=OTHER)).decision["replica_name"] == "qwen"
    assert (await client.chat(model="nobody's")).status == 404
    await stack.start("llama")
    await until_read(client.chat, lambda now: now.status == 200)
    assert (await client.chat(model=MODEL)).decision["replica_name"] == "llama"


async def test_model_that_nobody_serves_does_not_exist(client: Client, stack: Stack) -> None:
    await until_read(lambda: client.chat(model="nobody's"), lambda now: now.status == 404)
    answer = await client.chat(model="nobody's")
    assert "Retry-After" not in answer.headers
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    assert error["code"] == "model_not_found"
    assert error["message"].endswith(f"There are: `{MODEL}`, `{OTHER}`.")
    assert answer.decisions == []
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        with pytest.raises(openai.NotFoundError, match="`nobody's` does not exist"):
            await sdk.embeddings.create(model="nobody's", input="sea")


async def down(client: Client) -> bool:
    return not (await client.replica("alone"))["healthy"]


async def test_request_waits_until_the_only_replica_is_back(client: Client, stack: Stack) -> None:
    alone = client.of("alone")
    await until_read(alone.chat, lambda now: now.status == 200)
    await stack.stop("alone")
    await until(lambda: down(client))
    waits = asyncio.create_task(alone.chat())

    unserved_metric = f'extproc_requests_unserved{{model="{MODEL}",pool="alone"}}'

    async def unserved() -> bool:
        return await client.metric(unserved_metric) == 1.0

    await until(unserved)
    assert await client.metric('extproc_replicas_needed{pool="alone"}') >= 1.0
    await stack.start("alone")
    answer = await waits
    assert answer.status == 200
    assert answer.decision["outcome"]["waited_s"] > 0.0


async def test_request_gets_503_after_empty_s(client: Client, stack: Stack) -> None:
    await stack.stop("alone")
    await until(lambda: down(client))
    answer = await client.of("alone").chat()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    await stack.start("alone")

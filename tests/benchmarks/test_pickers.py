from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks import fleet
from benchmarks.compare import __main__ as compare
from benchmarks.compare.contenders import Fleet
from benchmarks.compare.pickers import Account
from tests.benchmarks.picker import LIE

FLEET = """
replicas:
- {name: a, profile: llama-8b-h100, count: 2}
"""
SERVERS = {"a-0": "127.0.0.1:1", "a-1": "127.0.0.1:2"}


def test_a_picker_whose_program_is_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        compare.main(["--contenders", "llm-d"])
    assert "llm-d needs the program epp" in capsys.readouterr().err


def test_a_kind_alone_is_its_usual_policy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare.contender("llm-d", programs).name == "llm-d:scorers"
    monkeypatch.setenv("PATH", str(programs))
    assert compare.contender("aibrix").name == "aibrix:least-request"
    with pytest.raises(ValueError, match="aibrix has no policy 'pd'"):
        compare.contender("aibrix:pd")


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (Account({"p"}, {"p"}, Counter({"127.0.0.1:1": 2}), 2, 0), []),
        (Account({"p"}, {"p"}, Counter({"127.0.0.1:1": 9}), None, 0), []),
        (
            Account({"p"}, {"p", "q"}, Counter({"127.0.0.1:1": 1, "127.0.0.1:2": 1}), 1, 3),
            [
                "it decided by ['p', 'q'], not by ['p']",
                "it uses 1 of 2 replicas",
                "it counts 3 failures",
                "1 requests went elsewhere than it said",
            ],
        ),
    ],
)
def test_picker_decisions_are_compared_with_served(account: Account, said: list[str]) -> None:
    served = ("127.0.0.1:1", "127.0.0.1:1", None)
    requests: list[dict[str, Any]] = [{"replica": one} for one in served]
    assert account.complaints(requests, SERVERS) == said


async def asked(
    name: str, programs: Path, directory: Path, fair: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    (directory / "fleet.yaml").write_text(FLEET)
    simulated = Fleet(fleet.read(directory / "fleet.yaml"))
    contender = compare.contender(name, programs, fair)
    records = []
    async with (
        simulated.fresh(directory) as (servers, _),
        contender.running(simulated, servers, directory, 0) as front,
        aiohttp.ClientSession(front.url) as session,
    ):
        assert {*front.parts} == {*contender.parts} == {"picker"}
        assert front.parts["picker"].running
        async with session.get("/v1/models") as listed:
            (model,) = (await listed.json())["data"]
            assert model["id"] == simulated.model
        for number in range(4):
            body = {"model": simulated.model, "prompt": f"{number}", "max_tokens": 2}
            streamed = bool(number % 2)
            async with session.post("/v1/completions", json={**body, "stream": streamed}) as answer:
                assert answer.status == 200
                text = await answer.text()
                assert text.endswith("data: [DONE]\n\n") == streamed
                records.append({"replica": answer.headers["x-served-by"]})
        assert {one["replica"] for one in records} == {*servers.values()}
        return records, await front.complaints(records)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "fair"),
    [
        *((f"llm-d:{policy}", False) for policy in ("scorers", "affinity", "active")),
        ("llm-d:scorers", True),
        ("aibrix:prefix-cache", False),
    ],
)
async def test_picker_does_policy(name: str, fair: bool, programs: Path, tmp_path: Path) -> None:
    records, complaints = await asked(name, programs, tmp_path, fair)
    # In turn, with none for what came without a body.
    assert complaints == []
    assert Counter(Counter(one["replica"] for one in records).values()) == {2: 2}


@pytest.mark.process
@pytest.mark.parametrize("name", ["llm-d:scorers", "aibrix:least-latency"])
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("policy", "it decided by"),
        ("replica", "2 requests went elsewhere"),
        ("failures", "it counts 2 failures"),
    ],
)
async def test_a_picker_that_says_otherwise_than_it_did_is_found_out(
    name: str, lie: str, said: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIE, lie)
    _, (complaint,) = await asked(name, programs, tmp_path)
    assert complaint.startswith(said)

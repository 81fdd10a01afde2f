"""A recorded run is replayed by ``extproc what-if``, and its record holds no text."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from extproc import cli
from extproc.lab.harness.samples import samples
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from extproc.lab.harness.traffic import send_all
from extproc.lab.replay.recorded import read
from tests.e2e.stack import SETTINGS, PatientStack, here

CANARY, REQUESTS = "xylophone", 48
FLEET = [SimulatedReplica(name, "llama-3-8b-a100") for name in ("one", "two")]


async def test_record_is_replayed_and_holds_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "record"
    record_to: dict[str, object] = {"path": str(folder)}
    async with PatientStack(
        tmp_path / "stack", here(FLEET), {**SETTINGS, "record": record_to}, pollers=0
    ) as stack:
        sent = islice(samples(MODEL, 12.0, Random(1)), REQUESTS)
        answers = await send_all(stack.url, sent, CANARY)
        served = {stack.address(replica.name) for replica in FLEET}
    assert all(answer.ok for answer in answers)
    record = read(folder)
    assert len(record.requests) == REQUESTS
    assert {request.replica for request in record.requests} == served == set(record.replicas)
    counted = {
        (answer.tokens("prompt"), answer.tokens("completion")) for answer in answers if answer.usage
    }
    assert counted <= {(each.prompt_tokens, each.output_tokens) for each in record.requests}
    assert not [file for file in folder.iterdir() if CANARY in file.read_text()]
    # A busy machine makes the replay inexact, which is exit status 1.
    assert cli.main(["what-if", str(folder), "--less", "two"]) in (0, 1)
    assert "on 2 replicas (one, two), policy completion" in capsys.readouterr().out

"""``benchmarks.fit``: recordings, their simulation, and the accuracy of the simulator."""

import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.fit.__main__ import RECORDED, RecordingClient, RecordingPlan, main
from benchmarks.fit.replay import (
    LEARNED,
    MEASURED,
    EngineLimits,
    Fitted,
    RecordedRequest,
    RecordedRun,
    Recording,
    bursts,
    fit,
    measured,
    read_recording,
    replay,
    write_recording,
)
from benchmarks.trace import TracedRequest
from extproc.lab.harness.processes import free_port
from extproc.predict.step import StepModel
from tests.benchmarks.conftest import CONVERSATION, simulated

LIMITS = EngineLimits(max_num_seqs=16, token_budget=2048, block_size=128, kv_tokens=32_768)
TRUE = StepModel(0.013, 0.0007, 0.0008, 2.5e-6, 5e-7, 0.008)


def served(traced: Sequence[TracedRequest], step: StepModel = TRUE) -> list[RecordedRequest]:
    sent = [
        RecordedRequest(request.at, request.prompt_tokens, request.output_tokens, 1.0, 1.0)
        for request in traced
    ]
    return replay(sent, step, LIMITS)


@pytest.fixture(scope="module")
def fitted() -> list[Fitted]:
    return fit(read_recording(RECORDED))


@pytest.mark.parametrize("kind", ["ttft", "completion"])
@pytest.mark.parametrize("origin", [MEASURED, LEARNED])
def test_simulator_is_within_15_percent(fitted: list[Fitted], origin: str, kind: str) -> None:
    assert len(fitted) == 2
    for run in fitted:
        errors = run.simulated[origin].comparisons[kind]["errors"]
        assert abs(errors["p50"]) <= 0.15
        assert abs(errors["p95"]) <= 0.15


def test_learned_step_times_of_an_h100_predict_its_completions() -> None:
    recording = read_recording(RECORDED.with_name("vllm-h100-8b.json.gz"))
    for run in fit(recording):
        compared = run.simulated[LEARNED].comparisons["completion"]
        assert compared["request_error"] <= 0.05
        assert all(abs(compared["errors"][name]) <= 0.06 for name in ("p50", "p95", "p99"))


def test_calibration_measures_true_step_times() -> None:
    served_bursts = [request for burst in bursts() for request in served(burst)]
    *step, frontend = astuple(measured(served_bursts))
    assert step == pytest.approx(astuple(TRUE)[:-1], rel=0.1)
    assert frontend == pytest.approx(TRUE.frontend, rel=0.2)


def test_request_in_the_front_end_misses_the_step() -> None:
    # The engine is idle when the second request is sent, but not when the request reaches it.
    traced = [TracedRequest(0.0, 1000, 1, None), TracedRequest(0.001, 10, 1, None)]
    first, second = served(traced, replace(TRUE, frontend=0.002))
    alone = served(traced[1:])[0]
    assert second.ttft_s > first.ttft_s + alone.ttft_s - 0.01


def test_runs_are_consecutive_slices_of_the_trace() -> None:
    first, second = RecordingPlan(CONVERSATION, 50, [1.0, 2.0], 6, 3).runs()
    (both,) = RecordingPlan(CONVERSATION, 100, [1.0], 6, 3).runs()
    prompts = [request.prompt_tokens for request in first + second]
    assert prompts == [request.prompt_tokens for request in both]
    assert first[0].at == second[0].at == 0.0
    assert second[-1].at == pytest.approx((both[-1].at - both[50].at) / 2)


def test_trace_without_enough_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="arrive at once"):
        RecordingPlan(CONVERSATION, 1, [1.0], 6, 3).runs()
    with pytest.raises(ValueError, match="too few requests"):
        RecordingPlan(CONVERSATION, 10_000, [1.0, 1.0], 6, 3).runs()


async def test_recorder_sends_the_lengths_of_the_trace() -> None:
    traced = [TracedRequest(0.01 * n, 50 + n, 20 + n, None) for n in range(20)]
    async with simulated(model="m", profile="llama-8b-h100", speed=20) as (replica, address):
        run = await RecordingClient(address, "m", Random(0)).play("run", [traced])
    lengths = [(request.prompt_tokens, request.output_tokens) for request in run.requests]
    assert lengths == [(50 + n, 20 + n) for n in range(20)]
    assert all(0 < request.ttft_s < request.completion_s for request in run.requests)
    assert run.polls
    assert replica.engine.counters.cached_tokens == 0


def test_recording_is_read_as_written_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun("a run", served([TracedRequest(0.0, 10, 10, None)]), [])
    recording = Recording({"server": "none"}, LIMITS, run, [run])
    for name in ("a.json", "a.json.gz"):
        write_recording(recording, tmp_path / name)
        assert read_recording(tmp_path / name) == recording

    (tmp_path / "a.json").write_text("{}")
    assert main(["--recording", str(tmp_path / "a.json")]) == 1
    assert f"{tmp_path / 'a.json'} is no recording" in capsys.readouterr().err


def test_server_that_does_not_answer_leaves_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.json"
    server = ["--server", f"127.0.0.1:{free_port()}", "--hardware", "none"]
    assert main([*server, "--recording", str(file)]) == 1
    assert capsys.readouterr().err.startswith("fit: ")
    assert not file.exists()
    with pytest.raises(SystemExit):
        main(server)
    assert "a new recording needs its file" in capsys.readouterr().err


def test_command_prints_and_stores_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "fit.json"
    assert main(["--json", str(stored)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(stored.read_text())
    for run in found["runs"]:
        assert f"{run['name']}, {len(run['requests'])} requests" in printed
        assert set(run["simulated"]) == {MEASURED, LEARNED}

"""``extproc what-if`` predicts the effect of changes, and refuses records it cannot replay."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from extproc.lab.replay.comparison import Difference
from extproc.lab.replay.figures import FIGURES
from extproc.lab.replay.play import play
from extproc.lab.replay.recorded import Recorded, read
from extproc.lab.replay.scene import Scene, scene_of
from extproc.lab.replay.what_if import Change, ChangeEffect, changed
from extproc.observe.record import Line, RefusedLine, ReplicaLine, RequestLine, text_of
from extproc.predict.inputs import Floats
from extproc.predict.step import PROFILES
from tests.conftest import Cli
from tests.lab.replay.record import (
    A10,
    BEGAN,
    MODEL,
    address,
    lines,
    replica,
    requests,
    start,
    write,
)

pytestmark = pytest.mark.slow

A100 = "llama-3-8b-a100"
WhatIf = Callable[..., dict[str, Any]]
Edit = Callable[[int, RequestLine], dict[str, Any]]


@pytest.fixture(scope="module")
def busy() -> list[Line]:
    """Half a minute of traffic near the capacity of two replicas."""
    return lines([A10, A10], start(), list(requests(4.0, 30.0)))


@pytest.fixture
def record(busy: Sequence[Line], tmp_path: Path) -> Path:
    return write(tmp_path / "record", busy)


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate once without and once with a change, instead of three times each."""
    monkeypatch.setattr("extproc.lab.replay.what_if.SEEDS", (0,))


@pytest.fixture
def what_if(cli: Cli) -> WhatIf:
    def run(folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
        printed, _ = cli("what-if", folder, "--json", *options, status=status)
        return dict(json.loads("\n".join(printed)))

    return run


def edited(every: Sequence[Line], edit: Edit) -> list[Line]:
    """Returns edited lines; ``edit(number, line)`` returns the fields to change in a request."""
    return [
        replace(line, **edit(number, line)) if isinstance(line, RequestLine) else line
        for number, line in enumerate(every)
    ]


def served(every: Sequence[Line]) -> list[RequestLine]:
    return [line for line in every if isinstance(line, RequestLine)]


def scene_with(served: Sequence[RequestLine], *fleet: ReplicaLine, **more: Any) -> Scene:
    """Returns the scene of a record, by default of replica 1."""
    states: dict[str, list[ReplicaLine]] = {}
    for line in fleet or [replica(1)]:
        states.setdefault(line.id, []).append(line)
    return scene_of(Recorded(start(), list(served), states, **more))


def difference(answer: dict[str, Any], figure: str) -> tuple[float, float, float]:
    found = answer["differences"]["completion_s"][figure]
    return found["low"], found["seconds"], found["high"]


def test_replay_is_near_the_record(record: Path, what_if: WhatIf) -> None:
    answer = what_if(record)
    fit = answer["replay"]["completion_s"]
    assert abs(fit["off"]["p95"]) < 0.02
    assert fit["request"] < 0.02
    assert answer["replicas"] == ["a", "b"]
    assert "differences" not in answer


def test_progress_ends_with_the_whole(record: Path) -> None:
    """Then the terminal's progress bar is removed."""
    shares = list[float]()
    play(scene_of(read(record)), 0, show=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_replayed_replica_has_the_step_times_that_were_learned_by_then() -> None:
    """Until the first measurement, the router took the A10 for an H100."""
    usual = PROFILES[A10].step
    slow = dataclasses.replace(usual.slowed(3.0), frontend=9.0)
    wrong = replica(1, "llama-8b-h100", measured=False)
    first = replica(1, at=BEGAN + 5.0, learned=usual)
    # In its last state the replica seems unusable, and yet it served requests.
    later = replica(1, at=BEGAN + 30.0, learned=slow, healthy=False, asleep=True)
    scene = scene_with(list(requests(0.5, 60.0)), wrong, first, later, replica(2, A100))
    assert [phase.step for phase in scene.replicas[address(1)].phases] == [usual, usual, slow]
    late = np.array([request.at > 30.0 for request in scene.requests])
    seconds = play(scene, 0, forced=True).completion_s - 9.0 * late
    per_token_s = seconds / [request.output_tokens for request in scene.requests]
    assert per_token_s[late].mean() == pytest.approx(3.0 * per_token_s[~late].mean(), rel=0.2)
    other = changed(scene, Change(traffic=2.0, hardware=[("b", A10)])).replicas
    assert [phase.at for phase in other[address(1)].phases] == [0.0, 2.5, 15.0]
    assert other[address(2)].phases[-1].step == slow  # as fast as the recorded A10


def swapped(every: Sequence[Line]) -> list[Line]:
    """Swap the completions of requests: percentiles stay right, single requests become wrong."""
    seconds = iter([line.seconds for line in [*served(every)[10:], *served(every)[:10]]])
    return edited(every, lambda _, line: {"seconds": next(seconds), "ttft_s": None})


def longer_median(every: Sequence[Line]) -> list[Line]:
    seconds = sorted(line.seconds for line in served(every))
    low, middle, long = (seconds[int(part * len(seconds))] for part in (0.2, 0.55, 0.8))

    def edit(_: int, line: RequestLine) -> dict[str, Any]:
        return {"seconds": long if low <= line.seconds < middle else line.seconds, "ttft_s": None}

    return edited(every, edit)


def longer_after_waiting(every: Sequence[Line]) -> list[Line]:
    earlier = [replace(line, at=line.at - 60.0) for line in every]
    return edited(
        earlier, lambda _, line: {"queued_s": 60.0, "seconds": 1.5 * line.seconds, "ttft_s": None}
    )


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (swapped, "at half of the requests"),
        (longer_median, "median"),
        (longer_after_waiting, "a change cannot be predicted"),
    ],
)
def test_replay_far_from_the_record_shows_its_error_and_predicts_no_change(
    busy: Sequence[Line],
    tmp_path: Path,
    cli: Cli,
    wrong: Callable[[Sequence[Line]], list[Line]],
    where: str,
) -> None:
    folder = write(tmp_path / "record", wrong(busy))
    printed, errors = cli("what-if", folder, "--more", "a", status=1)
    assert any(line.startswith("  off by ") for line in printed)
    assert "one more" not in "\n".join(printed)
    assert where in "\n".join(errors)


@pytest.mark.usefixtures("one_seed")
def test_recorded_policy_makes_no_difference(record: Path, what_if: WhatIf) -> None:
    assert difference(what_if(record, "--policy", "lmetric"), "p95") == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "sooner"),
    [
        (["--more", "a"], True),
        (["--more", "2"], True),
        (["--replica", f"b={A100}"], True),
        (["--less", "b"], False),
        (["--less", "1"], False),
        (["--traffic", "1.3"], False),
        (["--less", "a", "--more", "b", "--more", address(2)], True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("one_seed")
def test_capacity_shortens_and_traffic_prolongs_completions(
    record: Path, what_if: WhatIf, options: list[str], sooner: bool
) -> None:
    low, seconds, high = difference(what_if(record, *options), "mean")
    assert low <= seconds <= high
    assert high < 0.0 if sooner else low > 0.0


@pytest.mark.parametrize(("name", "more"), [("a", "a"), ("0", "1")])
@pytest.mark.usefixtures("one_seed")
def test_replica_that_left_is_not_copied(
    busy: Sequence[Line], tmp_path: Path, what_if: WhatIf, name: str, more: str
) -> None:
    """The pod of a StatefulSet gets another address when it is replaced, but keeps its name."""
    began, *rest = busy
    left = [replica(3, name=name), replace(replica(3, at=BEGAN + 1.0), state=None)]
    folder = write(tmp_path / "record", [began, *left, *rest])
    assert difference(what_if(folder, "--more", more), "mean")[2] < 0.0


def test_replica_that_left_does_not_stand_for_removed_replicas(
    busy: Sequence[Line], tmp_path: Path, cli: Cli
) -> None:
    began, *rest = busy
    left = [replica(3, name="c"), replace(replica(3, at=BEGAN + 1.0), state=None)]
    folder = write(tmp_path / "record", [began, *left, *rest])
    _, (error,) = cli("what-if", folder, "--less", "2", status=2)
    assert "no replica is left" in error


def test_random_policy_prolongs_completions(record: Path, what_if: WhatIf) -> None:
    low, seconds, high = difference(what_if(record, "--policy", "random"), "mean")
    assert 0.0 < low <= seconds <= high


@pytest.mark.usefixtures("one_seed")
def test_waiting_at_the_router_avoids_preemptions(tmp_path: Path, what_if: WhatIf) -> None:
    long = [replace(line, output_tokens=900.0, stream=False) for line in requests(1.5, 60.0)]
    folder = write(tmp_path / "record", lines([A10, A10], start(), long))
    answer = what_if(folder, "--hold", "on")
    assert difference(answer, "mean")[1] < 0.0
    assert answer["unserved"] == [0.0, 0.0]


def test_common_beginnings_of_prompts_are_cached(tmp_path: Path, what_if: WhatIf) -> None:
    """Prompts share 2,600 of 3,500 tokens; without the cache the replica would need twice the
    time."""
    shared = [replace(line, stream=False) for line in requests(2.0, 60.0, shared=40)]
    every = lines([A10], start(), shared)
    recorded = what_if(write(tmp_path / "record", every))["replay"]["completion_s"]["recorded"]
    assert recorded["p95"] < 30
    without_keys = edited(every, lambda *_: {"keys": ""})
    answer = what_if(write(tmp_path / "without-keys", without_keys), status=1)
    assert answer["replay"]["completion_s"]["off"]["p95"] > 0.5


def test_each_replica_has_its_own_block_size() -> None:
    on_second = [replace(line, replica=address(2)) for line in requests(2.0, 30.0, shared=40)]

    def completions(*block_sizes: int) -> Floats:
        fleet = [replica(number, block_size=size) for number, size in enumerate(block_sizes, 1)]
        return play(scene_with(on_second, *fleet), 0, forced=True).completion_s

    assert completions(64, 16).tolist() == completions(16, 16).tolist()


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(
    ("earlier", "later"),
    [({"models": ("other",)}, {"models": ("other", MODEL)}), ({"asleep": True}, {"asleep": False})],
    ids=["model", "sleep"],
)
def test_replica_that_serves_requests_later_is_replayed(
    earlier: dict[str, Any], later: dict[str, Any], forced: bool
) -> None:
    """Replica 2 serves requests from the start, replica 1 from second 10 on."""
    begins = BEGAN + 10.0
    every = [
        replace(line, replica=address(2 if line.at < begins else 1)) for line in requests(2.0, 30.0)
    ]
    states = [replica(1, listed=True, **earlier), replica(1, at=begins, listed=True, **later)]
    played = play(scene_with(every, *states, replica(2, listed=True)), 0, forced=forced)
    assert np.isfinite(played.completion_s).all()
    first = sum(line.at < begins for line in every)
    assert set(played.replicas[:first]) == {address(2)}
    assert address(1) in played.replicas[first:]


def test_urgent_requests_are_first_on_replicas_that_serve_them_first() -> None:
    every = [replace(line, priority=number % 2) for number, line in enumerate(requests(6.0, 30.0))]
    fifo, by_priority = (
        play(scene_with(every, replica(1, by_priority=first, max_num_seqs=8)), 0).ttft_s[1::2]
        for first in (False, True)
    )
    assert by_priority.mean() < 0.5 * fifo.mean()


@pytest.mark.parametrize("parts", [{"sequences": 2}, {"sequences": 0, "prompts": 2}])
def test_sequences_of_a_request_may_end_in_the_same_step(parts: dict[str, int]) -> None:
    every = [replace(line, **parts) for line in requests(2.0, 10.0)]
    assert np.isfinite(play(scene_with(every), 0).completion_s).all()


def test_equal_halves_of_keys_of_different_prompts_are_replayed() -> None:
    keys = [text_of(np.array(each, np.uint64) << np.uint64(32)) for each in ([1, 2, 3], [4, 1])]
    every = [replace(line, keys=keys[n % 2]) for n, line in enumerate(requests(4.0, 10.0))]
    assert np.isfinite(play(scene_with(every), 0).completion_s).all()


@pytest.mark.usefixtures("one_seed")
def test_replica_that_left_gets_no_more_requests(tmp_path: Path, what_if: WhatIf) -> None:
    left = replace(replica(2, at=BEGAN + 15.0), state=None)
    every = lines([A10, A10], start(), list(requests(2.5, 45.0)))
    before, after = (
        what_if(write(tmp_path / name, of), "--traffic", "1.01")["differences"]["completion_s"]
        for name, of in (("stayed", every), ("left", [*every, left]))
    )
    assert after["mean"]["before"] > 1.2 * before["mean"]["before"]


def test_files_of_several_routers_are_merged(
    busy: Sequence[Line], tmp_path: Path, what_if: WhatIf
) -> None:
    fleet = [line for line in busy if not isinstance(line, RequestLine)]
    all_served = served(busy)
    parts = ("50051.1", all_served[:49]), ("50051", all_served[49::2]), ("9", all_served[50::2])
    for name, part in parts:
        write(tmp_path / "record", [*fleet, *part], f"default-{name}")
    assert len(read(tmp_path / "record").requests) == len(all_served)
    assert abs(what_if(tmp_path / "record")["replay"]["completion_s"]["off"]["p95"]) < 0.02


def test_folder_of_several_pools_needs_the_name_of_one(
    busy: Sequence[Line], tmp_path: Path, cli: Cli
) -> None:
    folder = write(tmp_path / "record", busy)
    write(folder, [replace(start(), pool="chat"), *busy[1:9]], "chat-50051")
    _, (error,) = cli("what-if", folder, status=2)
    assert "several pools, chat, default: choose with --pool" in error
    assert read(folder, "default").requests == served(busy)
    _, (error,) = cli("what-if", folder / "none", status=2)
    assert "does not exist: name the folder that is record.path" in error


def test_record_begins_when_every_router_writes(busy: Sequence[Line], tmp_path: Path) -> None:
    fleet = [line for line in busy if isinstance(line, ReplicaLine)]
    late = [replace(start(), at=BEGAN + after) for after in (10.0, 20.0)]
    folder = write(tmp_path / "record", [start(), *fleet, *served(busy)[::2]])
    write(folder, [late[0], *fleet, *served(busy)[1::4]], "default-9.1")
    write(folder, [late[1], *fleet, *served(busy)[3::4]], "default-9")
    found = read(folder)
    assert found.requests == [line for line in served(busy) if line.at >= BEGAN + 10.0]
    assert (found.unused_s, found.unused_why) == (10.0, "not all routers recorded yet")


def test_drafts_of_a_replica_that_left_count() -> None:
    drafts = replace(replica(1), tokens_per_step=2.0, token_budget=512.0, max_num_seqs=32.0)
    left = replace(replica(1, at=BEGAN + 99.0), state=None)
    request = replace(next(requests(1.0, 60.0)), output_tokens=90.0)
    scene = scene_with([request, replace(request, output_tokens=1.0)], drafts, left)
    assert [each.output_tokens for each in scene.requests] == [45, 1]
    hardware = scene.replicas[address(1)].hardware
    assert (hardware.token_budget, hardware.max_num_seqs) == (512, 32)


def test_refused_request_gets_the_length_of_an_answer_to_a_similar_request() -> None:
    request = replace(next(requests(1.0, 60.0)), output_tokens=90.0)
    whole = replace(request, output_tokens=30.0, stream=False)
    every = [request, whole, replace(request, output_tokens=0.0, sequences=0)]
    refused = [
        replace(line, at=request.at + after_s, replica="", output_tokens=0.0)
        for after_s in (-1.0, 1.0)
        for line in (*every, replace(request, output_bound=20))
    ]
    lengths = [each.output_tokens for each in scene_with(every, refused=refused).requests]
    assert lengths == [90, 30, 0, 20, 90, 30, 0, 90, 30, 0, 20]


def test_keys_of_answers_and_tokens_per_key_are_taken_from_other_requests() -> None:
    """The next prompt of a conversation shows the answer; models have their own tokens per key."""
    two, five = (text_of(np.arange(1, n, dtype=np.uint64) << np.uint64(32)) for n in (3, 6))
    first = replace(next(requests(1.0, 60.0)), keys=two, unit=64.0, whole=7)
    then = replace(first, keys=five, unit=80.0, whole=0, previous_key=7, previous_tokens=320.0)
    other = replace(first, model="qwen", unit=32.0, whole=0)
    found = scene_with([first, then, then, other, replace(other, unit=0.0)]).requests
    assert [each.unit for each in found] == [80.0, 80.0, 80.0, 32.0, 32.0]
    assert [len(each.hashes(16)) for each in found] == [20, 25, 25, 4, 4]


def test_figures_exclude_cut_answers(
    busy: Sequence[Line], tmp_path: Path, record: Path, what_if: WhatIf, cli: Cli
) -> None:
    def edit(number: int, _: RequestLine) -> dict[str, Any]:
        cut = {"seconds": 0.01, "cut": True, "complete": False}
        return cut if number % 3 == 0 else {"ttft_s": None}

    whole, part = what_if(record), what_if(write(tmp_path / "cut", edited(busy, edit)))
    assert part["requests"] < 0.7 * whole["requests"]
    assert abs(part["replay"]["completion_s"]["off"]["p95"]) < 0.02
    all_cut = edited(busy, lambda *_: {"cut": True, "complete": False})
    cli("what-if", write(tmp_path / "all-cut", all_cut), status=2)


@pytest.mark.usefixtures("one_seed")
def test_short_record_warns_of_unreliable_bounds(record: Path, cli: Cli) -> None:
    printed, _ = cli("what-if", record, "--more", "a")
    assert "record for longer" in "\n".join(printed)


def test_change_and_its_effect_are_printed() -> None:
    change = Change("random", ["a"], ["b"], [("c", A10)], 1.5, hold=False)
    difference = dict.fromkeys(FIGURES, Difference(1.0, 2.5, 1.5, -0.5, 3.5))
    effect = ChangeEffect(str(change), {"ttft_s": difference}, False, (0.0, 0.125))
    assert str(effect).splitlines() == [
        f"with policy random, one more like a, without b, c on {A10}, 1.5× the traffic, queue off",
        "",
        "seconds                 mean            p50            p95            p99",
        "TTFT as it is" + "          1.000" * 4,
        "  changed    " + "          2.500" * 4,
        "  difference " + "           +1.5" * 4,
        "  90% between" + "  -0.5 and +3.5" * 4,
        "",
        "requests without a replica: 0.0% as it is, 12.5% changed; the figures exclude them",
    ]
    assert not str(Change())


def test_requests_under_an_earlier_configuration_are_not_replayed(
    busy: Sequence[Line], tmp_path: Path
) -> None:
    earlier = replace(start("random"), at=BEGAN - 100.0)
    before = replace(next(requests(1.0, 60.0)), at=BEGAN - 3.0)
    record = read(write(tmp_path / "record", [earlier, before, *busy]))
    assert record.start == start()
    assert scene_of(record).requests[0].at == pytest.approx(served(busy)[0].at - BEGAN)


def test_truncated_line_is_skipped_and_counted(busy: Sequence[Line], record: Path) -> None:
    (file,) = record.iterdir()
    file.write_bytes(file.read_bytes()[:-30])
    found = read(record)
    assert len(found.requests) == len(served(busy)) - 1
    assert found.excluded == {"whose line cannot be read": 1}


@pytest.mark.usefixtures("one_seed")
def test_change_is_predicted_with_the_requests_that_were_refused(
    busy: Sequence[Line], tmp_path: Path, what_if: WhatIf
) -> None:
    nothing: dict[str, Any] = {"replica": "", "seconds": 0.0, "output_tokens": 0.0, "ttft_s": None}
    refused = {"refused": "too_many_waiting", "complete": False, "keys": b"", **nothing}
    more = edited(busy, lambda *_: refused)  # without keys, no prompt is cached for its copy
    answers = [
        what_if(write(tmp_path / name, every), "--more", "a")
        for name, every in (("without", busy), ("with", [*busy, *served(more)]))
    ]
    most = answers[0]["requests"]
    assert [(each["requests"], each["refused"]) for each in answers] == [(most, 0), (most, most)]
    without, among_twice_as_many = (
        answer["differences"]["completion_s"]["mean"]["before"] for answer in answers
    )
    assert among_twice_as_many > 1.5 * without


def test_parts_that_are_not_replayed_are_named_with_the_reason(
    busy: Sequence[Line], tmp_path: Path, cli: Cli
) -> None:
    earlier = replace(start("random"), at=BEGAN - 120.0)
    refused = [RefusedLine(BEGAN + number, "saturated") for number in range(3)]
    folder = write(tmp_path / "record", [earlier, *busy, *refused])
    output = "\n".join(cli("what-if", folder)[0])
    assert "not used: the first 2.0 min of the record, because the configuration differed" in output
    assert "excluded: 3 requests, refused (saturated)" in output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--less", "z"], "the record has no replica 'z'; its replicas: a, b"),
        (["--less", "2"], "no replica is left"),
        (["--less", "b", "--less", "1"], "replica 'b' cannot be removed twice"),
        (["--more", "0"], "0 replicas change nothing"),
        (["--less", "00"], "00 replicas change nothing"),
        (["--replica", "a=h1000"], "no hardware profile is named 'h1000'"),
        (["--pool", "other"], "holds no record of pool 'other', but of default"),
    ],
    ids=str,
)
def test_impossible_change_fails_before_the_replay(
    record: Path, cli: Cli, options: list[str], error: str
) -> None:
    printed, (line,) = cli("what-if", record, *options, status=2)
    assert error in line
    assert not printed


def test_overloaded_replicas_are_an_error(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 2 decodes a token in a minute: in the record, replica 1 serves all requests."""
    monkeypatch.setattr("extproc.lab.replay.simulation._LONGEST_DRAIN", 600.0)
    slow = replica(2, learned={"c0": 60.0, "c_prefill": 0.0, "c_batch": 0.0, "c_kv": 0.0})
    began = start("completion")
    began.config["poll"] = {"interval_s": 1.0}
    unstreamed = [replace(line, stream=False) for line in requests(1.0, 30.0)]
    folder = write(tmp_path / "record", lines([A10], began, unstreamed, [slow]))
    _, (error,) = cli("what-if", folder, "--less", "a", status=2)
    assert "the replicas are overloaded" in error


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"kind":"start","at":1,"format":0}', "has format 0, but this version reads 2"),
        ('{"kind":"request"', "holds no record"),
        ("not a line\n" * 11, "is no record: 11 of its lines cannot be read"),
        ('{"kind":"refused","at":1,"why":"full"}', "is no record: it has no start line"),
        ("", "holds no record"),
    ],
)
def test_file_without_a_record_is_an_error(tmp_path: Path, cli: Cli, text: str, error: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    _, (line,) = cli("what-if", file, status=2)
    assert error in line

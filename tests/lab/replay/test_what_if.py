"""``extproc what-if`` on records of which it is known what happened, and what would have."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from extproc import cli
from extproc.lab.replay.play import play
from extproc.lab.replay.recorded import Recorded, read
from extproc.lab.replay.scene import scene_of
from extproc.lab.replay.speeds import step_times
from extproc.observe.record import Line, RefusedLine, ReplicaLine, RequestLine, StartLine, text_of
from extproc.predict.inputs import Floats
from tests.lab.replay.record import A10, BEGAN, address, lines, replica, requests, start, write

A100 = "llama-3-8b-a100"
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def busy() -> list[Line]:
    """Half a minute on two replicas that have hardly enough time."""
    return lines([A10, A10], start(), list(requests(4.0, 30.0)))


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a run without a change and one with it, instead of three each."""
    monkeypatch.setattr("extproc.lab.replay.what_if.SEEDS", (0,))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Asks, and returns the figures."""

    def run(folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
        assert cli.main(["what-if", str(folder), "--json", *options]) == status
        return dict(json.loads(capsys.readouterr().out))

    return run


def difference(answer: dict[str, Any], figure: str) -> tuple[float, float, float]:
    one = answer["differences"]["completion_s"][figure]
    return one["low"], one["seconds"], one["high"]


def test_what_happened_is_replayed(busy: Sequence[Line], tmp_path: Path, ask: Ask) -> None:
    answer = ask(write(tmp_path / "record", busy))
    fit = answer["replay"]["completion_s"]
    assert abs(fit["off"]["p95"]) < 0.02
    assert fit["request"] < 0.02
    assert answer["replicas"] == ["a", "b"]
    assert "differences" not in answer


def test_streams_tell_how_fast_replicas_are_whose_profile_is_wrong(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    wrong = [
        msgspec.structs.replace(one, state=(one.state or {}) | {"profile": "llama-8b-h100"})
        if isinstance(one, ReplicaLine)
        else one
        for one in busy
    ]
    fit = ask(write(tmp_path / "record", wrong))["replay"]["completion_s"]
    assert max(map(abs, fit["off"].values())) < 0.05
    assert fit["request"] < 0.05


def test_requests_that_were_not_so_are_refused(
    busy: Sequence[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though all together they took as long."""
    served = [one for one in busy if isinstance(one, RequestLine)]
    seconds = [one.seconds for one in served]
    swapped = [
        msgspec.structs.replace(one, seconds=other, ttft_s=None)
        for one, other in zip(served, seconds[10:] + seconds[:10], strict=True)
    ]
    known = [one for one in busy if not isinstance(one, RequestLine)]
    assert cli.main(["what-if", str(write(tmp_path / "record", [*known, *swapped]))]) == 1
    assert "at half of the requests" in capsys.readouterr().err


def test_times_that_were_not_so_are_refused(
    busy: Sequence[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = [
        msgspec.structs.replace(one, seconds=3.0 * one.seconds)
        if isinstance(one, RequestLine) and number % 2
        else one
        for number, one in enumerate(busy)
    ]
    folder = write(tmp_path / "record", longer)
    assert cli.main(["what-if", str(folder), "--more", "a"]) == 1
    told = capsys.readouterr()
    assert "off by" in told.out
    assert "one more" not in told.out
    assert "it tells nothing of what would happen" in told.err


def test_waiting_at_the_router_hides_no_wrong_replay(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    waited = [
        msgspec.structs.replace(
            one, at=one.at - 60.0, waited_s=60.0, seconds=1.5 * one.seconds, ttft_s=None
        )
        if isinstance(one, RequestLine)
        else msgspec.structs.replace(one, at=one.at - 60.0)
        for one in busy
    ]
    ask(write(tmp_path / "record", waited), status=1)


def test_a_median_that_was_not_so_is_refused(
    busy: Sequence[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = sorted(one.seconds for one in busy if isinstance(one, RequestLine))
    low, middle, long = (served[int(part * len(served))] for part in (0.2, 0.55, 0.8))
    wrong = [
        msgspec.structs.replace(
            one, seconds=long if low <= one.seconds < middle else one.seconds, ttft_s=None
        )
        if isinstance(one, RequestLine)
        else one
        for one in busy
    ]
    assert cli.main(["what-if", str(write(tmp_path / "record", wrong))]) == 1
    assert "median" in capsys.readouterr().err


@pytest.mark.usefixtures("one_seed")
def test_what_changes_nothing_differs_by_nothing(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    answer = ask(write(tmp_path / "record", busy), "--policy", "lmetric")
    assert difference(answer, "p95") == (0.0, 0.0, 0.0)


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
def test_a_change_is_for_better_or_worse(
    busy: Sequence[Line], tmp_path: Path, ask: Ask, options: list[str], sooner: bool
) -> None:
    low, seconds, high = difference(ask(write(tmp_path / "record", busy), *options), "mean")
    assert low <= seconds <= high
    assert high < 0.0 if sooner else low > 0.0


def test_random_choice_is_for_worse(busy: Sequence[Line], tmp_path: Path, ask: Ask) -> None:
    folder = write(tmp_path / "record", busy)
    low, seconds, high = difference(ask(folder, "--policy", "random"), "mean")
    assert 0.0 < low <= seconds <= high


@pytest.mark.usefixtures("one_seed")
def test_what_waits_at_the_router_is_not_preempted(tmp_path: Path, ask: Ask) -> None:
    asked = [
        msgspec.structs.replace(one, output_tokens=900.0, stream=False)
        for one in requests(1.5, 60.0)
    ]
    folder = write(tmp_path / "record", lines([A10, A10], start(), asked))
    assert difference(ask(folder, "--hold", "on"), "mean")[1] < 0.0


def test_prompts_that_begin_alike_are_cached(tmp_path: Path, ask: Ask) -> None:
    """Prompts of some 3,500 tokens, 2,600 of which all have in common, would take twice the time
    there is."""
    asked = (msgspec.structs.replace(one, stream=False) for one in requests(2.0, 60.0, shared=40))
    every = lines([A10], start(), list(asked))
    assert ask(write(tmp_path / "record", every))["replay"]["completion_s"]["recorded"]["p95"] < 30
    alone = [
        msgspec.structs.replace(one, keys="") if isinstance(one, RequestLine) else one
        for one in every
    ]
    answer = ask(write(tmp_path / "alone", alone), status=1)
    assert answer["replay"]["completion_s"]["off"]["p95"] > 0.5


def test_each_replica_has_blocks_of_its_own_size() -> None:
    asked = [
        msgspec.structs.replace(one, replica=address(2)) for one in requests(2.0, 30.0, shared=40)
    ]

    def completions(*block_sizes: int) -> Floats:
        """Record of requests that all go to replica 2."""
        fleet = [replica(number, block_size=size) for number, size in enumerate(block_sizes, 1)]
        scene = scene_of(Recorded(start(), asked, {one.id: [one] for one in fleet}))
        return play(scene, 0, forced=True).completion_s

    assert completions(64, 16).tolist() == completions(16, 16).tolist()


@pytest.mark.usefixtures("one_seed")
def test_halves_of_keys_may_be_alike_where_prompts_are_not(tmp_path: Path, ask: Ask) -> None:
    first, second = (
        text_of(np.array(keys, np.uint64) << np.uint64(32)) for keys in ([1, 2, 3], [4, 1])
    )
    every = [
        msgspec.structs.replace(one, keys=(first, second)[number % 2])
        for number, one in enumerate(requests(4.0, 10.0))
    ]
    ask(write(tmp_path / "record", lines([A10, A10], start(), every)), "--traffic", "1.01")


@pytest.mark.usefixtures("one_seed")
def test_a_replica_that_left_gets_nothing_more(tmp_path: Path, ask: Ask) -> None:
    gone = msgspec.structs.replace(replica(2, at=BEGAN + 15.0), state=None)
    asked = list(requests(2.5, 45.0))
    every = lines([A10, A10], start(), asked)
    whole, part = write(tmp_path / "whole", every), write(tmp_path / "part", [*every, gone])
    before = ask(whole, "--traffic", "1.01")["differences"]["completion_s"]["mean"]["before"]
    after = ask(part, "--traffic", "1.01")["differences"]["completion_s"]["mean"]["before"]
    assert after > 1.2 * before  # though in truth it had gone on


def test_several_routers_and_files_are_one_record(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    known = [one for one in busy if not isinstance(one, RequestLine)]
    served = [one for one in busy if isinstance(one, RequestLine)]
    for name, part in (("50051.1", served[:49]), ("50051", served[49::2]), ("9", served[50::2])):
        write(tmp_path / "record", [*known, *part], f"default-{name}")
    assert len(read(tmp_path / "record").requests) == len(served)
    assert abs(ask(tmp_path / "record")["replay"]["completion_s"]["off"]["p95"]) < 0.02


def test_a_record_begins_when_every_router_writes(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    fleet = [one for one in busy if not isinstance(one, StartLine | RequestLine)]
    served = [one for one in busy if isinstance(one, RequestLine)]
    late = [msgspec.structs.replace(start(), at=BEGAN + after) for after in (10.0, 20.0)]
    folder = write(tmp_path / "record", [start(), *fleet, *served[::2]])
    write(folder, [late[0], *fleet, *served[1::4]], "default-9.1")
    write(folder, [late[1], *fleet, *served[3::4]], "default-9")
    requests = read(folder).requests
    assert requests == [one for one in served if one.at >= BEGAN + 10.0]


def test_what_was_sent_before_the_record_begins_is_not_in_it(
    busy: Sequence[Line], tmp_path: Path
) -> None:
    before = msgspec.structs.replace(next(requests(1.0, 60.0)), at=BEGAN - 3.0)
    scene = scene_of(read(write(tmp_path / "record", [before, *busy])))
    assert scene.requests[0].at == pytest.approx(next(requests(4.0, 80.0)).at - BEGAN)


def test_drafts_of_a_replica_that_left_count_as_before(tmp_path: Path) -> None:
    drafts = msgspec.structs.replace(replica(1), tokens_per_step=2.0)
    left = msgspec.structs.replace(replica(1, at=BEGAN + 99.0), state=None)
    asked = next(requests(1.0, 60.0))
    scene = scene_of(read(write(tmp_path / "record", [start(), drafts, asked, left])))
    assert scene.requests[0].output_tokens == round(asked.output_tokens / 2.0)


def test_figures_are_not_made_of_answers_that_were_cut(
    busy: Sequence[Line], tmp_path: Path, ask: Ask
) -> None:
    cut = [
        msgspec.structs.replace(one, seconds=0.01, cut=True, complete=False)
        if isinstance(one, RequestLine) and number % 3 == 0
        else msgspec.structs.replace(one, ttft_s=None)
        if isinstance(one, RequestLine)
        else one
        for number, one in enumerate(busy)
    ]
    whole, part = (ask(write(tmp_path / name, of)) for name, of in (("whole", busy), ("cut", cut)))
    assert part["requests"] < 0.7 * whole["requests"]
    assert abs(part["replay"]["completion_s"]["off"]["p95"]) < 0.02


@pytest.mark.usefixtures("one_seed")
def test_few_stretches_of_time_are_told(
    busy: Sequence[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["what-if", str(write(tmp_path / "record", busy)), "--more", "a"])
    assert "record for longer" in capsys.readouterr().out


def test_what_was_decided_otherwise_before_is_left_out(
    busy: Sequence[Line], tmp_path: Path
) -> None:
    other = msgspec.structs.replace(start("random"), at=BEGAN - 100.0)
    before = msgspec.structs.replace(next(requests(1.0, 60.0)), at=BEGAN - 50.0)
    record = read(write(tmp_path / "record", [other, before, *busy]))
    assert record.start == start()
    assert min(one.at for one in record.requests) > BEGAN


def test_a_line_that_was_cut_short_is_passed_over(busy: Sequence[Line], tmp_path: Path) -> None:
    folder = write(tmp_path / "record", busy)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-30])
    served = sum(isinstance(one, RequestLine) for one in busy)
    record = read(folder)
    assert len(record.requests) == served - 1
    assert record.left_out == {"whose line cannot be read": 1}


def test_removed_page_option_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["what-if", "record", "--page", "answer.html"])
    assert "removed: --json prints all figures" in capsys.readouterr().err


def test_requests_that_were_refused_are_told_of(
    busy: Sequence[Line], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [RefusedLine(BEGAN + number, "saturated") for number in range(3)]
    assert cli.main(["what-if", str(write(tmp_path / "record", [*busy, *more]))]) == 0
    assert "left out: 3 requests, refused (saturated)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--less", "z"], "the record has no replica 'z', but a, b"),
        (["--less", "2"], "no replica is left"),
        (["--more", "0"], "0 replicas more or less change nothing"),
        (["--less", "00"], "00 replicas more or less change nothing"),
        (["--replica", "a=h1000"], "no hardware profile is named 'h1000'"),
        (["--pool", "other"], "holds no record of pool 'other', but of default"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told(
    busy: Sequence[Line],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    assert cli.main(["what-if", str(write(tmp_path / "record", busy)), *options]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out  # before anything is played


def test_that_replicas_cannot_carry_so_much_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 2 takes a minute for a token, so that all requests went to replica 1."""
    monkeypatch.setattr("extproc.lab.replay.simulation._LONGEST_DRAIN", 600.0)
    slow = replica(2, learned={"c0": 60.0, "c_prefill": 0.0, "c_batch": 0.0, "c_kv": 0.0})
    began = start("completion")
    began.config["poll"] = {"interval_s": 1.0}
    asked = [msgspec.structs.replace(one, stream=False) for one in requests(1.0, 30.0)]
    folder = write(tmp_path / "record", lines([A10], began, asked, [slow]))
    assert cli.main(["what-if", str(folder), "--less", "a"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "the replicas cannot carry so much" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kind":"start","at":1,"format":0}', "has format 0, and this version reads 2"),
        ('{"kind":"request"', "holds no record"),
        ("not a line\n" * 11, "is no record: 11 of its lines cannot be read"),
        ('{"kind":"refused","at":1,"why":"full"}', "is no record: it does not begin as one"),
        ("", "holds no record"),
    ],
)
def test_what_is_no_record_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)
    assert cli.main(["what-if", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_long_record_takes_little_memory() -> None:
    """Half a day; one number for each pair of moments in it would be 150 MB."""
    seconds = 12 * 3600.0
    streams = [msgspec.structs.replace(one, ttft_s=0.2, keys="") for one in requests(0.1, seconds)]
    told = [
        replica(1, at=BEGAN + at, steps=40 * at, prompt_tokens=90 * at, generated_tokens=11 * at)
        for at in range(0, int(seconds), 10)
    ]
    tracemalloc.start()
    try:
        step_times({address(1): told}, streams)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000_000


def test_step_times_are_told_from_counters() -> None:
    """A card that decodes half as fast as its profile says and prefills twice as fast; for the last
    third it is throttled."""
    c0, c_prefill, at, steps, prompts, told = 0.058, 0.00013, BEGAN, 0, 0, []
    for number in range(60):
        slow = 2.0 if number >= 40 else 1.0
        told.append(replica(1, at=at, steps=steps, prompt_tokens=prompts, generated_tokens=steps))
        steps, prompts = steps + 60 + 10 * (number % 3), prompts + 5000 * (number % 4)
        at += slow * (c0 * (60 + 10 * (number % 3)) + c_prefill * 5000 * (number % 4)) + 7.0
        # and the rest of the time nobody was there
    served = [
        msgspec.structs.replace(
            one, at=before.at, seconds=after.at - before.at - 7.0, prompt_tokens=1
        )
        for one, before, after in zip(requests(100.0, 9.0), told, told[1:], strict=False)
    ]
    models = step_times({address(1): told}, served)[address(1)]
    assert models[10].step_time(0, 1, 100) == pytest.approx(c0, rel=0.1)
    assert models[10].c_prefill == pytest.approx(c_prefill, rel=0.15)
    ratio = models[-5].step_time(0, 1, 100) / models[10].step_time(0, 1, 100)
    assert ratio == pytest.approx(2.0, rel=0.05)

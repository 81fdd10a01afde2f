"""Reports: figures beside the best other contender, their sentences, and the page."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from PIL import Image  # comes with matplotlib

from benchmarks.report import figures
from benchmarks.report.markdown import PAGE, markdown, write
from benchmarks.report.results import read
from benchmarks.report.words import median_and_range, short, terminal_result

Json = dict[str, Any]
PICTURE = "figures.png"


class ReportPage:
    def __init__(self, text: str) -> None:
        self.text = plain(text)
        self.links = re.findall(r"\]\(([^)]*)\)", text)
        rows = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
        self.rows = [re.split(r" \| ", row) for row in rows]
        outcome = text.partition("## How it was measured")[0]
        self.said = [plain(line[2:]) for line in outcome.splitlines() if line.startswith("- ")]

    def row(self, name: str) -> list[str]:
        return next([*map(plain, row)] for row in self.rows if plain(row[0]) == name)


def plain(markdown: str) -> str:
    return re.sub(r"\\(.)", r"\1", markdown.replace("**", ""))


def request(number: int, completion: float, **more: Any) -> Json:
    fields: Json = {"at_s": 0.1 * number, "ttft_s": completion / 10, "completion_s": completion}
    return fields | {"streamed": number % 4 == 0} | more


def run(name: str, scale: float, repeat: int = 0, requests: int = 200) -> Json:
    drawn = np.random.default_rng(repeat).lognormal(0.0, 0.8, requests) * scale
    listed = [request(number, float(completion)) for number, completion in enumerate(drawn)]
    return {"run": {"name": name, "repeat": repeat}, "requests": listed}


def compared(*runs: Json, **about: Any) -> Json:
    return {"compare": {"trace": "conv", "machine": "a lathe", **about}, "runs": list(runs)}


def completions(result: Json) -> list[float]:
    return [each["completion_s"] for each in result["requests"] if each["completion_s"]]


def written(results: Json, folder: Path) -> ReportPage:
    path = write(results, folder)
    assert path == folder / PAGE
    return ReportPage(path.read_text())


def page_without_picture(results: Json) -> ReportPage:
    return ReportPage(markdown(read(results)))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Path]:
    runs = [run(name, scale, n) for n in range(3) for name, scale in (("ours", 1), ("theirs", 2))]
    results = compared(*runs, command="python -m benchmarks.compare", versions={"envoy": "1.40.0"})
    folder = tmp_path_factory.mktemp("report")
    write(results, folder)
    return results, folder


def test_each_contender_has_a_row_of_figures(both: tuple[Json, Path]) -> None:
    results, folder = both
    page = ReportPage((folder / PAGE).read_text())
    for name in ("ours", "theirs"):
        cells = page.row(name)
        runs = [each for each in results["runs"] if each["run"]["name"] == name]
        p99 = figures.TurnSpread.of(float(np.percentile(completions(each), 99)) for each in runs)
        mean = figures.TurnSpread.of(float(np.mean(completions(each))) for each in runs)
        assert cells[1:4] == ["200", "50", "0"]
        assert cells[4] == median_and_range(p99)
        assert cells[7] == median_and_range(mean)
        streamed = [[r["ttft_s"] for r in each["requests"] if r["streamed"]] for each in runs]
        assert cells[10] == median_and_range(figures.TurnSpread.of(map(fmean, streamed)))


def test_picture_of_an_earlier_report_is_removed(tmp_path: Path) -> None:
    written(compared(run("us", 1), run("them", 2)), tmp_path)
    mine = tmp_path / "mine.png"
    mine.touch()
    bare = [{"at_s": 1.0, "completion_s": 2.0}, {"at_s": 2.0, "completion_s": 4.0}]
    page = written({"run": {"name": "bare"}, "requests": bare}, tmp_path)
    assert page.row("bare")[1:3] == ["2", "–"]
    assert [path.stem for path in tmp_path.glob("*.png")] == ["mine"]


def test_own_contenders_and_references_are_not_rivals() -> None:
    oracle = run("oracle", 0.1)
    oracle["run"]["reference"] = True
    runs = [run("envoy", 4), run("ours b", 1), run("ours a", 2), oracle]
    page = page_without_picture(compared(*runs, ours=["ours a", "ours b"]))
    assert "ours a is 0.500× the best other (envoy), in a single run" in page.said[0]
    assert "oracle cannot exist in production" in page.text


def test_page_links_to_picture_and_json(both: tuple[Json, Path]) -> None:
    page = ReportPage((both[1] / PAGE).read_text())
    assert json.loads((both[1] / "results.json").read_text()) == both[0]
    for shown in ("a lathe", "python -m benchmarks.compare", "envoy: 1.40.0"):
        assert shown in page.text
    assert page.links == [PICTURE, "results.json"]
    with Image.open(both[1] / PICTURE) as image:
        image.load()
        assert 500 < image.width < 2400
        assert 100 < image.height < 3000
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20  # not empty


def test_name_with_markup_is_shown_as_text(tmp_path: Path) -> None:
    name = "<b> | **$x_{$** [a](b)"
    page = written(compared(run(name, 1), run("other", 2), machine=name), tmp_path)
    assert page.row(name)[0] == name
    assert page.said[0].startswith(f"Completion, p99: {name} is ")


def test_single_run_is_compared_with_nothing(tmp_path: Path) -> None:
    page = written(run("alone", 1) | {"summary": {"warnings": ["the client was busy"]}}, tmp_path)
    assert page.said[0] == f"Completion, p99: {page.row('alone')[4]} s."
    assert page.said[-1] == "Warning, alone: the client was busy"
    assert not list(tmp_path.glob("*.png"))


def test_report_of_failed_requests_has_no_picture(tmp_path: Path) -> None:
    dead = run("dead", 1, requests=3)
    for each in dead["requests"]:
        each |= {"error": "connect", "completion_s": None, "ttft_s": None, "failed_after_s": 0.5}
    page = written(compared(dead), tmp_path)
    assert page.said == [
        "dead: no request was answered.",
        "Failed requests: dead 3 of 3. Figures are of answered requests only.",
    ]
    assert not list(tmp_path.glob("*.png"))


def test_failed_and_uncounted_requests_are_in_no_latency() -> None:
    requests = [
        request(0, 1.0),
        request(1, 50.0, error="broken stream"),
        request(2, 90.0, counted=False),
    ]
    page = page_without_picture({"run": {"name": "single"}, "requests": requests})
    assert page.row("single")[1:5] == ["2", "1", "1", "1.00"]


def test_figures_have_three_digits() -> None:
    shown = {0.0: "0", 0.412: "0.412", 1.5: "1.50", 1234.0: "1,234"}
    assert {value: short(value) for value in shown} == shown
    assert median_and_range(figures.TurnSpread.of([0.9, 1.0, 1.1])) == "1.00 (0.900…1.10)"


DOUBT: Json = {"validity": {"doubts": ["CPU 95% busy"]}}
WRONG: Json = {"complaints": ["1 of 3 requests failed"]}


def turn(name: str, repeat: int, completion: float | None, **more: Any) -> Json:
    """Turn with three requests of this completion time, or without requests."""
    requests = [] if completion is None else [{"at_s": 0.0, "completion_s": completion}] * 3
    return {"run": {"name": name, "repeat": repeat}, "requests": requests, **more}


def about_us(*runs: Json) -> Json:
    return compared(*runs, ours=["us"])


def turns(**values: tuple[float, ...]) -> Json:
    return about_us(
        *(turn(name, n, value) for name, each in values.items() for n, value in enumerate(each))
    )


def test_ratio_is_to_the_best_other_of_the_same_turn() -> None:
    results = turns(us=(1.0, 2.0, 8.0), a=(2.0, 2.5, 12.0), b=(4.0, 3.0, 10.0))
    found = figures.to_json(results)
    spread = {"median": 2.0, "least": 1.0, "most": 8.0, "turns": 3}
    assert found["contenders"]["us"]["Completion, mean"] == spread
    assert found["contenders"]["us"]["TTFT, mean"] is None
    beside = found["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.8, "least": 0.5, "most": 0.8, "turns": 3}
    assert beside["names"] == ("a", "b")
    assert (beside["less"], beside["more"]) == (3, 0)


NO_RUN = "us has no run: nothing is compared."
ALONE = "Nothing is compared: in no run are both us and another without doubt."


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            turns(us=(1.0, 2.0), them=(2.0, 5.0)),
            "Completion, mean: us is 0.450× the best other (them), better in all 2 runs "
            "(0.400…0.500). 1.50 s against 3.50 s.",
        ),
        (turns(us=(2.0, 5.0), them=(1.0, 2.0)), "worse in all 2 runs (2.00…2.50)"),
        (
            turns(us=(1.0, 1.0, 2.0), them=(2.0, 2.0, 1.0)),
            "better in 2 of 3 runs (0.500…2.00): no clear difference",
        ),
        (turns(us=(1.0,) * 2, a=(1.0,) * 2), "better in 0 of 2 runs: no clear difference"),
        (
            turns(us=(0.5,), them=(3.0,)),
            "Completion, mean: us is 0.167× the best other (them), in a single run, which shows "
            "no spread. 0.500 s against 3.00 s.",
        ),
        (turns(us=(1.0, 1.0), them=(2.0, 2.0)), "better in all 2 runs. 1.00 s"),
        (turns(us=(1.0, 1.0, 1.5), them=(2.0,) * 3), "1.00 (1.00…1.50)"),
        (
            about_us(turn("us", 0, 1.0), turn("us", 1, 0.1, **DOUBT), turn("them", 0, 2.0)),
            "us is 0.500× the best other (them), in a single run",
        ),
        (about_us(turn("us", 0, 1.0), turn("them", 0, 2.0, **WRONG)), ALONE),
        (about_us(turn("us", 0, 1.0, **DOUBT), turn("them", 0, 2.0)), ALONE),
        (
            about_us(turn("us", 0, 1.0, **DOUBT), turn("us", 1, 1.0), turn("them", 0, 2.0)),
            "Completion, mean: 1.00 s.",
        ),
        (about_us(turn("them", 0, 1.0)), NO_RUN),
        (compared(turn("a", 0, 1.0), turn("b", 0, 2.0), ours=[]), "a is 0.500× the best other (b)"),
        (
            about_us(turn("us", 0, None, **WRONG), turn("them", 0, 1.0)),
            "us: no request was answered.",
        ),
    ],
)
def test_terminal_compares_turns_without_doubt(results: Json, said: str) -> None:
    printed = terminal_result(results)
    assert said in printed
    if said in (ALONE, NO_RUN):
        assert "×" not in printed
        beside = figures.to_json(results)["beside_best"]
        assert beside == dict.fromkeys(beside)
    if all(run["run"]["repeat"] == 0 for run in results["runs"]):
        assert "…" not in printed


@pytest.mark.parametrize("wrong", [DOUBT, WRONG])
def test_turn_in_doubt_is_never_the_best_other(wrong: Json) -> None:
    doubtful = [turn("fast", 0, 0.1, **wrong), turn("fast", 1, 4.0)]
    others = [turn("us", 0, 1.0), turn("us", 1, 1.0), turn("slow", 0, 2.0), turn("slow", 1, 5.0)]
    results = about_us(*doubtful, *others)
    beside = figures.to_json(results)["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.375, "least": 0.25, "most": 0.5, "turns": 2}
    printed = terminal_result(results)
    assert "fast ! " in printed
    assert "In doubt: fast in 1 of 2 runs. Comparisons leave these runs out." in printed

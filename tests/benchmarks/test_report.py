import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from PIL import Image  # comes with matplotlib

from benchmarks.report.__main__ import main
from benchmarks.report.markdown import PAGE, markdown, write
from benchmarks.report.pictures import in_flight, share_within
from benchmarks.report.results import Request, Run, read
from benchmarks.report.words import between, ratio, seconds

Json = dict[str, Any]
PICTURES = {"figures", "completion", "ttft", "load", "prediction"}


class Page:
    """Text and links of a page in Markdown."""

    def __init__(self, text: str) -> None:
        self.text = plain(text)
        self.links = re.findall(r"\]\(([^)]*)\)", text)
        rows = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
        self.rows = [re.split(r" \| ", row) for row in rows]
        outcome = text.partition("## How it was measured")[0]
        self.said = [plain(line[2:]) for line in outcome.splitlines() if line.startswith("- ")]
        # Names of the rows with a bold figure.
        self.best = {plain(row[0]) for row in self.rows for cell in row if cell.startswith("**")}

    def row(self, name: str) -> list[str]:
        return next([*map(plain, row)] for row in self.rows if plain(row[0]) == name)


def plain(markdown: str) -> str:
    return re.sub(r"\\(.)", r"\1", markdown.replace("**", ""))


def request(number: int, completion: float, **more: Any) -> Json:
    fields: Json = {"at_s": 0.1 * number, "ttft_s": completion / 10, "completion_s": completion}
    fields |= {"replica": f"r-{number % 2}", "predicted_completion_s": completion}
    return fields | {"streamed": number % 4 == 0} | more


def run(name: str, scale: float, repeat: int = 0, requests: int = 200) -> Json:
    drawn = np.random.default_rng(repeat).lognormal(0.0, 0.8, requests) * scale
    listed = [request(number, float(one)) for number, one in enumerate(drawn)]
    return {"run": {"name": name, "repeat": repeat}, "requests": listed}


def compared(*runs: Json, **about: Any) -> Json:
    return {"compare": {"trace": "conv", "machine": "a lathe", **about}, "runs": list(runs)}


def completions(of: Json) -> list[float]:
    return [one["completion_s"] for one in of["requests"] if one["completion_s"]]


def written(results: Json, folder: Path) -> Page:
    path = write(results, folder)
    assert path == folder / PAGE
    return Page(path.read_text())


def told(results: Json) -> Page:
    """Page without its pictures."""
    return Page(markdown(read(results), []))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Path]:
    runs = [run(name, scale, n) for n in range(3) for name, scale in (("ours", 1), ("theirs", 2))]
    results = compared(*runs, command="python -m benchmarks.compare", versions={"envoy": "1.40.0"})
    folder = tmp_path_factory.mktemp("report")
    write(results, folder)
    return results, folder


def test_each_contender_has_row_with_its_figures(
    both: tuple[Json, Path],
) -> None:
    results, folder = both
    page = Page((folder / PAGE).read_text())
    for name in ("ours", "theirs"):
        cells = page.row(name)
        runs = [one for one in results["runs"] if one["run"]["name"] == name]
        p99 = sorted(float(np.percentile(completions(one), 99)) for one in runs)
        mean = sorted(float(np.mean(completions(one))) for one in runs)
        assert cells[1:4] == ["200", "50", "0"]
        assert cells[4].startswith(f"{seconds(p99[1])} {between(p99[0], p99[2])} ")
        assert cells[7].startswith(f"{seconds(mean[1])} {between(mean[0], mean[2])} ")
        assert cells[10].startswith(seconds(mean[1] / 10))  # TTFT is a tenth
    assert page.row("ours")[4].endswith(" 0.50×")
    assert page.row("theirs")[4].endswith(" 2.00×")
    assert page.best == {"ours"}


def test_what_came_out_is_said_first(both: tuple[Json, Path]) -> None:
    said = Page((both[1] / PAGE).read_text()).said
    assert len(said) == 4
    assert said[0].startswith(
        "Completion, p99: ours is 0.50× the best other (theirs), better in all 3 turns. "
    )


def test_pictures_of_an_earlier_run_are_not_left(tmp_path: Path) -> None:
    written(compared(run("us", 1), run("them", 2)), tmp_path)
    mine = tmp_path / "mine.png"
    mine.touch()
    written({"run": {}, "requests": [{"at_s": 1.0, "completion_s": 2.0}]}, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"completion", "mine"}


def test_own_contenders_and_references_are_no_rivals() -> None:
    oracle = run("oracle", 0.1)
    oracle["run"]["reference"] = True
    runs = [run("envoy", 4), run("ours b", 1), run("ours a", 2), oracle]
    page = told(compared(*runs, ours=["ours a", "ours b"]))
    assert "ours a is 0.50× the best other (envoy), in one turn" in page.said[0]
    assert page.row("ours b")[4].endswith(" 0.50×")  # beside the best other, which is ours, too


def test_page_links_to_its_pictures_and_its_json(both: tuple[Json, Path]) -> None:
    page = Page((both[1] / PAGE).read_text())
    for shown in ("a lathe", "python -m benchmarks.compare", "envoy: 1.40.0"):
        assert shown in page.text
    assert {*page.links} == {*(f"{name}.png" for name in PICTURES), "results.json"}
    assert {path.stem for path in both[1].glob("*.png")} == PICTURES
    for path in both[1].glob("*.png"):
        with Image.open(path) as image:
            image.load()
            assert 500 < image.width < 2400
            assert 200 < image.height < 3000
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20  # not empty


def test_names_are_text_and_neither_markup_nor_formulas(tmp_path: Path) -> None:
    name = "<b> | **$x_{$** [a](b)"
    page = written(compared(run(name, 1), run("other", 2), machine=name), tmp_path)
    assert page.row(name)[0] == name
    assert page.said[0].startswith(f"Completion, p99: {name} is ")


def test_the_report_can_be_drawn_again_from_its_own_json(
    both: tuple[Json, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, folder = both
    assert json.loads((folder / "results.json").read_text()) == results
    again = tmp_path / "again"
    assert main([str(folder / "results.json"), "--out", str(again)]) == 0
    assert capsys.readouterr().out.strip() == str(again / PAGE)
    assert (again / PAGE).read_text() == (folder / PAGE).read_text()


def test_one_run_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    page = written(run("alone", 1) | {"summary": {"warnings": ["the client was busy"]}}, tmp_path)
    assert page.said[0] == f"Completion, p99: {page.row('alone')[4]}."
    assert "×" not in page.row("alone")[4]
    assert page.said[-1] == "Warning, alone: the client was busy"
    assert {path.stem for path in tmp_path.glob("*.png")} == PICTURES - {"figures"}


def test_requests_may_hold_their_arrival_and_completion_alone(tmp_path: Path) -> None:
    bare = [{"at_s": 1.0, "completion_s": 2.0}, {"at_s": 2.0, "completion_s": 4.0}]
    page = written({"run": {"name": "bare"}, "requests": bare}, tmp_path)
    assert page.row("bare")[1:3] == ["2", "–"]
    assert {path.stem for path in tmp_path.glob("*.png")} == {"completion"}


def test_all_requests_failed(tmp_path: Path) -> None:
    dead = run("dead", 1, requests=3)
    for one in dead["requests"]:
        one |= {"error": "connect", "completion_s": None, "ttft_s": None, "failed_after_s": 0.5}
    page = written(compared(dead), tmp_path)
    assert page.said == [
        "dead: no request was answered.",
        "Failed requests: dead 3 of 3. Figures are of those answered.",
    ]
    assert {path.stem for path in tmp_path.glob("*.png")} == {"load"}


def test_what_failed_or_is_not_counted_is_in_no_latency() -> None:
    requests = [
        request(0, 1.0),
        request(1, 50.0, error="broken stream"),
        request(2, 90.0, counted=False),
    ]
    page = told({"run": {"name": "one"}, "requests": requests})
    assert page.row("one")[1:5] == ["2", "1", "1", "1.00 s"]


def test_requests_in_flight_are_those_sent_and_not_ended() -> None:
    requests = [
        Request(at_s=1.0, late_s=0.5, completion_s=2.0, replica="a"),
        Request(at_s=2.0, error="timeout", failed_after_s=4.0, replica="a"),
        Request(at_s=2.0, completion_s=1.0, replica="b"),
    ]
    of = Run(requests=requests)
    times = np.array([1.2, 1.6, 3.0, 4.0, 7.0])
    assert in_flight(of, "a", times).tolist() == [0, 1, 2, 1, 0]


def test_the_share_of_predictions_that_were_near() -> None:
    pairs = np.array([(predicted, 1.0) for predicted in (1.25, 0.8, 1.9, 2.1)])
    assert share_within(pairs) == (0.5, 0.75)


def test_figures_have_three_digits_and_their_unit() -> None:
    shown = {0.00712: "7.12 ms", 0.412: "412 ms", 0.9999: "1.00 s", 1234.0: "1,234 s"}
    assert {value: seconds(value) for value in shown} == shown
    assert between(0.95, 1.05) == "0.95 – 1.05 s"
    assert ratio(0.453) == "0.45×"


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        ([], "not an object"),
        ({"policies": []}, "neither of run, compare and simulate"),
        ({"compare": {}, "runs": []}, "runs: "),
        ({"compare": {}}, "runs: "),
        ({"compare": 3, "runs": []}, "about: "),
        ({"run": {}, "requests": [{"completion_s": 1}]}, "runs.0.requests.0.at_s: Field required"),
        ({"run": {}, "requests": [{"at_s": "soon"}]}, "runs.0.requests.0.at_s: "),
        ({"run": {}, "requests": [{"at_s": 1, "ttft_s": 0}]}, "runs.0.requests.0.ttft_s: "),
    ],
)
def test_what_is_no_result_is_refused_and_nothing_drawn(
    results: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(results))
    assert main([str(file), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert complaint in said
    assert not list((tmp_path / "out").glob("*"))


def test_report_names_unusable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, broken, good = (tmp_path / f"{name}.json" for name in ("missing", "broken", "good"))
    broken.write_bytes(b'{"run": \xff')
    good.write_text(json.dumps(run("a", 1, requests=2)))
    for file, out in ((missing, tmp_path), (broken, tmp_path), (good, good / "report")):
        assert main([str(file), "--out", str(out)]) == 2
        assert str(out if file == good else file) in capsys.readouterr().err

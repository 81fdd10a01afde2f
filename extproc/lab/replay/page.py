"""A replay and its answer as a page with pictures: one HTML file that needs nothing else."""

from collections.abc import Iterator, Mapping
from html import escape
from math import ceil, floor, log10
from string import Template

import numpy as np

from extproc.lab.replay import show
from extproc.lab.replay.comparison import KINDS, counted
from extproc.lab.replay.play import Played
from extproc.lab.replay.scene import Scene
from extproc.lab.replay.what_if import Answer, Replayed
from extproc.predict.inputs import Floats

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 320, 60, 20, 16, 48
_POINTS = np.concatenate([np.linspace(0.0, 98.0, 99), np.linspace(98.1, 99.9, 19)])
"""Percentiles that a line is drawn through."""
_SHARES = 0.0, 50.0, 90.0, 99.0, 99.9
_LOOKS = 'class="first"', 'class="second"'
_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>What if</title>
<style>
  :root { color-scheme: light dark; --text: #1c1e21; --quiet: #5c6168; --line: #dedfe2;
    --ground: #fbfbfa; --first: #0b63c5; --second: #c2410c; }
  @media (prefers-color-scheme: dark) { :root { --text: #e7e9eb; --quiet: #a2a9b1;
    --line: #33383d; --ground: #131517; --first: #7ab7ff; --second: #ffab70; } }
  body { margin: 0 auto; max-width: 84rem; padding: 1rem 1.5rem 3rem; color: var(--text);
    background: var(--ground); font: 0.9375rem/1.5 system-ui, sans-serif; }
  h1 { font-size: 1.25rem; } h2 { font-size: 1.0625rem; margin-top: 2rem; }
  pre { overflow-x: auto; font-size: 0.8125rem; }
  .pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
  figure { margin: 0; flex: 1 1 24rem; } figcaption { color: var(--quiet); }
  svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
  svg text { fill: var(--quiet); } svg .grid { stroke: var(--line); }
  svg polyline { fill: none; stroke-width: 2; }
  .first { stroke: var(--first); } .second { stroke: var(--second); stroke-dasharray: 6 3; }
  svg text.first { fill: var(--first); stroke: none; }
  svg text.second { fill: var(--second); stroke: none; }
</style>
<h1>$title</h1>
$parts
</html>
""")


def page(replayed: Replayed, answer: Answer | None) -> str:
    """The page; without an answer, only how far the replay is from what happened."""
    scene = replayed.scene
    parts = list(_part("What happened, and its replay", show.replayed(replayed), replayed, scene))
    if answer:
        parts += _part("What would be otherwise", show.answer(answer), answer, scene)
    title = f"What if: {answer.change}" if answer else "A replay"
    return _PAGE.substitute(title=escape(title), parts="\n".join(parts))


def _part(title: str, text: str, one: Replayed | Answer, scene: Scene) -> Iterator[str]:
    yield f'<h2>{title}</h2>\n<div class="pictures">'
    for kind, name in KINDS.items():
        lines = _times(scene, kind, one.runs)
        if len(lines) == len(one.runs):
            yield f"<figure>{_picture(lines)}<figcaption>{name}, seconds</figcaption></figure>"
    yield f"</div>\n<pre>{escape(text)}</pre>"


def _times(scene: Scene, kind: str, runs: Mapping[str, Played]) -> dict[str, Floats]:
    """Of the requests that figures are made of, the times that every run knows."""
    among = counted(scene, kind)
    every = {name: getattr(run, kind)[among] for name, run in runs.items()}
    known = np.isfinite(list(every.values())).all(axis=0)
    return {name: times[known] for name, times in every.items() if known.any()}


def _picture(lines: Mapping[str, Floats]) -> str:
    """Which share of the requests took at most so long; both axes as logarithms."""
    drawn = [np.maximum(np.percentile(times, _POINTS), 1e-3) for times in lines.values()]
    low = floor(3.0 * log10(min(float(values.min()) for values in drawn))) / 3.0
    high = max(ceil(3.0 * log10(max(float(values.max()) for values in drawn))) / 3.0, low + 0.1)
    parts = [*_across(), *_along(low, high)]
    for (name, look), values in zip(zip(lines, _LOOKS, strict=True), drawn, strict=True):
        points = " ".join(
            f"{_x(value, low, high):.1f},{_y(share):.1f}"
            for value, share in zip(values.tolist(), _POINTS.tolist(), strict=True)
        )
        parts.append(f'<polyline {look} points="{points}"/>')
        y = _HEIGHT - _BOTTOM - 12 - 18 * (look == _LOOKS[0])
        x = _WIDTH - _RIGHT - 8
        parts.append(f'<text {look} x="{x}" y="{y}" text-anchor="end">{escape(name)}</text>')
    told = escape(" and ".join(lines))
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="distributions: {told}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def _across() -> Iterator[str]:
    for share in _SHARES:
        y = _y(share)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:g}%</text>'


def _along(low: float, high: float) -> Iterator[str]:
    for value in (digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)):
        if low <= log10(value) <= high:
            x = _x(value, low, high)
            yield f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
            y = _HEIGHT - _BOTTOM + 20
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{value:g}</text>'


def _x(seconds: float, low: float, high: float) -> float:
    return _LEFT + (log10(seconds) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    """So that 90, 99 and 99.9% are as far apart."""
    return _HEIGHT - _BOTTOM + log10(1.0 - share / 100.0) / 3.0 * (_HEIGHT - _TOP - _BOTTOM)

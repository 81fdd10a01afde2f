"""A replay and its answer as text for people."""

from collections.abc import Iterator

from extproc.ground.text import Column, figure, table
from extproc.lab.replay.comparison import KINDS
from extproc.lab.replay.distribution import FIGURES
from extproc.lab.replay.what_if import Answer, Replayed

_FIGURES = [Column(name) for name in FIGURES]


def replayed(one: Replayed) -> str:
    """How far the replay is from what happened."""
    scene = one.scene
    rows = []
    for kind, fit in one.fits.items():
        rows.append([f"{KINDS[kind]} recorded", *map(figure, fit.recorded.values())])
        rows.append(["  replayed", *map(figure, fit.replayed.values())])
        rows.append(["  off by", *(f"{off:+.1%}" for off in fit.off.values())])
    request = one.fits["completion_s"].request
    names, policy = ", ".join(scene.names), scene.config.route.policy
    head = (
        f"{one.requests} requests of {scene.lasts_s / 60:.1f} min on {len(scene.members)} replicas "
        f"({names}), policy {policy}; the median completion is off by {request:.1%}"
    )
    return "\n".join([head, "", *table([Column("seconds since sent", left=True), *_FIGURES], rows)])


def answer(one: Answer) -> str:
    """What would be otherwise."""
    columns = [Column("seconds", left=True), *_FIGURES]
    lines = [f"with {one.change}", "", *table(columns, list(_differences(one)))]
    if any(one.unserved):
        before, after = one.unserved
        left = f"{before:.1%} as it is, {after:.1%} changed"
        lines += ["", f"nobody would serve {left} of all requests; the figures are of the others"]
    if one.short:
        lines += [
            "",
            "it is less sure than that: a third of the record is not ten times as long as the 95th "
            "percentile of completions: record for longer",
        ]
    return "\n".join(lines)


def _differences(one: Answer) -> Iterator[list[str]]:
    for kind, figures in one.differences.items():
        each = [figures[name] for name in FIGURES]
        yield [f"{KINDS[kind]} as it is", *(figure(one.before) for one in each)]
        yield ["  changed", *(figure(one.after) for one in each)]
        yield ["  difference", *(f"{one.seconds:+.3g}" for one in each)]
        yield ["  90% between", *(f"{one.low:+.3g} and {one.high:+.3g}" for one in each)]

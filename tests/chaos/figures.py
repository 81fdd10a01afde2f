"""What became of the requests of one scene, and whether that is good enough."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from extproc.lab.harness.envoy_config import Access
from extproc.lab.harness.traffic import Answer
from tests.chaos.scenes import Scene

GRACE_S = 4.0
"""Within so many seconds a failing replica is to be left out: one that hangs after three timeouts
of a scrape."""
MOST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened, on the monotonic clock."""

    began: float
    failed: float
    mended: float
    over: float | None  # None: it was not over after all the patience there is
    ended: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a scene, as its client and Envoy saw it."""

    answer: Answer
    access: Access

    @property
    def begun(self) -> bool:
        """Whether the headers of an answer with status 200 had come."""
        return self.answer.status == 200

    @property
    def first_choice(self) -> str:
        """``ip:port`` it was sent to at first: the router's choice, else what Envoy chose."""
        return self.access.destination.split(",")[0] or self.access.upstream


class Figures:
    """The figures of a scene."""

    def __init__(
        self,
        scene: Scene,
        times: Times,
        answers: Iterable[Answer],
        accesses: Mapping[str, Access],
        victim: str,
        oldest_s: float,
    ) -> None:
        """The figures.

        Args:
            scene: what was played.
            times: when.
            answers: of this scene and others.
            accesses: the same as Envoy saw them, by request id.
            victim: ``ip:port`` of the replica that failed, empty where none did.
            oldest_s: age of the oldest figures that a router had of another replica.
        """
        self.scene = scene
        self.times = times
        self.oldest_s = oldest_s
        self._victim = victim
        self.requests = [
            Request(answer, accesses[answer.request_id])
            for answer in answers
            if times.began <= answer.sent_at < times.ended
        ]
        self.failed = [request for request in self.requests if not request.answer.ok]

    @property
    def excused(self) -> list[Request]:
        """Failed, and being answered by the very replica that was killed or stopped."""
        if not self.scene.loses_answers:
            return []
        return [
            request
            for request in self.failed
            if request.begun and request.access.upstream == self._victim
        ]

    @property
    def share(self) -> float | None:
        """The failing replica's share of the requests, from :data:`GRACE_S` on to the mending."""
        begin, end = self.times.failed + GRACE_S, self.times.mended
        sent = [one.first_choice for one in self.requests if begin <= one.answer.sent_at < end]
        return sent.count(self._victim) / len(sent) if self._victim and sent else None

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the mending until all was as before."""
        return None if self.times.over is None else self.times.over - self.times.mended

    @property
    def unrouted(self) -> int:
        """Requests that Envoy placed without a router."""
        return sum(not request.access.destination for request in self.requests)

    def problems(self) -> list[str]:
        """What must not be."""
        found = []
        if lost := len(self.failed) - len(self.excused):
            found.append(f"{lost} requests failed that were not being answered by the failing part")
        if self.share is not None and self.share >= MOST_SHARE:
            found.append(f"the failing replica still got {self.share:.1%} of the traffic")
        if self.recovery_s is None:
            found.append("it did not recover")
        if self.oldest_s > self.scene.most_age_s:
            found.append(f"figures of other replicas were {self.oldest_s:.1f} s old")
        return found

    def row(self) -> list[str]:
        """For the table, under :data:`HEADINGS`."""
        ttft = [one.answer.ttft_s for one in self.requests if one.answer.ttft_s is not None]
        completion = [one.answer.completion_s for one in self.requests if one.answer.ok]
        return [
            self.scene.name,
            str(len(self.requests)),
            str(self.unrouted),
            f"{len(self.failed)} ({len(self.excused)})",
            *(_seconds(values, at) for values in (ttft, completion) for at in (0.5, 0.99)),
            "" if self.share is None else f"{self.share:.1%}",
            "never" if self.recovery_s is None else f"{self.recovery_s:.1f}",
            f"{self.oldest_s:.1f}",
        ]

    def failures(self, names: Mapping[str, str]) -> Counter[str]:
        """Failed requests by what happened to them, where and in which phase."""
        return Counter(
            f"on {names.get(one.access.upstream, one.access.upstream) or 'no replica'}, "
            f"{'while answering' if one.begun else 'before an answer'}, "
            f"Envoy says {one.access.status} {one.access.flags}: {one.answer.account[:100]}"
            for one in self.failed
        )


HEADINGS = (
    "scene",
    "requests",
    "unrouted",
    "failed (its own)",
    "TTFT p50 s",
    "p99",
    "whole p50 s",
    "p99",
    "share after 4 s",
    "recovery s",
    "oldest state s",
)


def _seconds(values: Sequence[float], at: float) -> str:
    return f"{sorted(values)[int(at * len(values))]:.3f}" if values else ""

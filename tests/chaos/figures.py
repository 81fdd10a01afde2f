"""Figures of a scene's requests, and the problems that the figures show."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from extproc.lab.harness.envoy_config import Access
from extproc.lab.harness.traffic import Answer
from tests.chaos.scenes import ChaosScene


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a scene on the monotonic clock."""

    began: float
    failed: float
    mended: float
    recovered: float | None  # None: not within the time limit
    ended: float


@dataclass(frozen=True, slots=True)
class SceneRequest:
    """Request of a scene, as its client and Envoy saw it."""

    answer: Answer
    access: Access

    @property
    def begun(self) -> bool:
        """True if the client received headers with status 200, or Envoy held these headers until
        the router had read them, and answered 502 when the body broke off."""
        return self.answer.status == 200 or self.access.status == 502

    @property
    def first_choice(self) -> str:
        """First destination, ``ip:port``: the router's choice, else Envoy's."""
        return self.access.destination.split(",")[0] or self.access.upstream


class SceneFigures:
    def __init__(
        self,
        scene: ChaosScene,
        times: Times,
        answers: Iterable[Answer],
        accesses: Mapping[str, Access],
        victim: str,
        oldest_s: float,
    ) -> None:
        """Select the requests of the scene.

        Args:
            scene: the scene that was played.
            times: its times.
            answers: answers of this and other scenes.
            accesses: Envoy's access log by request id.
            victim: ``ip:port`` of the replica that failed; empty: no replica failed.
            oldest_s: age of the oldest state that a router had of another replica.
        """
        self.scene = scene
        self.times = times
        self.oldest_s = oldest_s
        self._victim = victim
        self.requests = [
            SceneRequest(answer, accesses[answer.request_id])
            for answer in answers
            if times.began <= answer.sent_at < times.ended
        ]
        self.failed = [request for request in self.requests if not request.answer.ok]

    @property
    def excused(self) -> list[SceneRequest]:
        """Failed requests that are no problem: the failed replica was answering them. If no replica
        was left: those with a begun answer or a 503, until the recovery."""
        if self.scene.loses_requests:
            end = self.times.recovered or self.times.ended
            return [
                request
                for request in self.failed
                if request.answer.sent_at < end and (request.begun or request.access.status == 503)
            ]
        if not self.scene.loses_answers:
            return []
        return [
            request
            for request in self.failed
            if request.begun and request.access.upstream == self._victim
        ]

    @property
    def share(self) -> float | None:
        """The failing replica's share of requests, from ``ChaosScene.excluded_s`` to the repair."""
        begin, end = self.times.failed + self.scene.excluded_s, self.times.mended
        sent = [
            request.first_choice
            for request in self.requests
            if begin <= request.answer.sent_at < end
        ]
        return sent.count(self._victim) / len(sent) if self._victim and sent else None

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the repair to the recovery."""
        times = self.times
        return None if times.recovered is None else times.recovered - times.mended

    @property
    def unrouted(self) -> int:
        """Number of requests for which Envoy chose the replica itself."""
        accesses = [request.access for request in self.requests]
        return sum(not access.destination and bool(access.upstream) for access in accesses)

    def problems(self) -> list[str]:
        found = []
        if lost := len(self.failed) - len(self.excused):
            found.append(f"{lost} requests failed that the failing part was not answering")
        if self.share is not None and self.share >= self.scene.most_share:
            found.append(f"the failing replica still got {self.share:.1%} of the requests")
        if self.recovery_s is None:
            found.append("the system did not recover")
        if self.oldest_s > self.scene.most_age_s:
            found.append(f"states of other replicas were {self.oldest_s:.1f} s old")
        return found

    def row(self) -> list[str]:
        """Cells under :data:`HEADINGS`."""
        answers = [request.answer for request in self.requests]
        ttft = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
        completion = [answer.completion_s for answer in answers if answer.ok]
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
        """Count failed requests by replica, phase, and what Envoy and the client report."""
        return Counter(
            f"on {names.get(access.upstream, access.upstream) or 'no replica'}, "
            f"{'while answering' if request.begun else 'before an answer'}, "
            f"Envoy says {access.status} {access.flags}: {request.answer.account[:100]}"
            for request in self.failed
            for access in [request.access]
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
    "share once excluded",
    "recovery s",
    "oldest state s",
)


def _seconds(values: Sequence[float], at: float) -> str:
    return f"{sorted(values)[int(at * len(values))]:.3f}" if values else ""

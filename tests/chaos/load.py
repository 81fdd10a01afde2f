"""Requests at a steady rate, sent by the demo's load client."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Self

from extproc.lab.harness.samples import Lengths, SampleKind, samples
from extproc.lab.harness.stack import MODEL
from extproc.lab.harness.traffic import Answer, Client, TimedRequest, to_send

_GIVE_UP_S = 60.0
_PROMPT = Lengths(60, 0.7, 20, 200)
SHORT = SampleKind("short", 1.0, _PROMPT, Lengths(25, 0.6, 8, 64))
LONG = SampleKind("long", 1.0, _PROMPT, Lengths(120, 0.6, 40, 300))


class SteadyLoad:
    """Sends requests inside the block; at its end waits for all responses."""

    def __init__(
        self, url: str, per_second: float, random: Random, kind: SampleKind = SHORT
    ) -> None:
        self._client = Client(url, _GIVE_UP_S)
        self._samples = samples(MODEL, per_second, random, [kind])
        self._stopped = False

    @property
    def answers(self) -> dict[str, Answer]:
        """Answers by request id, also of requests still in flight."""
        return self._client.answers

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self._sending = asyncio.create_task(self._client.run(self._requests()))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = True
        if kind is not None:
            self._sending.cancel()
        await asyncio.wait([self._sending])
        await self._client.__aexit__()
        if kind is None:
            self._sending.result()

    def _requests(self) -> Iterator[TimedRequest]:
        for number, sample in enumerate(self._samples):
            if self._stopped:
                return
            name = f"chaos-{number:06}"
            yield to_send(sample, name, name)

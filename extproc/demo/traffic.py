"""An open-loop client: requests leave at their time, whether or not earlier ones were answered."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp

from extproc.demo.samples import Sample

POLICY_HEADER = "x-extproc-policy"
_OUTPUT_HEADER = "x-simulate-output-tokens"
_GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request, as its client saw it."""

    request_id: str
    ttft_s: float | None
    """Seconds to the first token; None where the answer was not streamed."""
    completion_s: float
    """Seconds to the end of the answer."""
    problem: str = ""
    """Empty for a whole answer with status 200."""

    @property
    def ok(self) -> bool:
        """Whether the answer is whole."""
        return not self.problem


async def send_all(
    url: str, requests: Iterable[Sample], run: str, policy: str | None = None
) -> list[Answer]:
    """Send every request at its time, and return the answers when the last one is there.

    Args:
        url: where to: Envoy.
        requests: in order of their times.
        run: names the run; request ids are ``run-001`` and so on.
        policy: asks the router for this policy instead of its default.
    """
    started = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_GIVE_UP_S)
    async with (
        aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        sent = []
        for number, sample in enumerate(requests, 1):
            await asyncio.sleep(started + sample.at_s - time.monotonic())
            request_id = f"{run}-{number:03}"
            sent.append(tasks.create_task(_send(session, sample, run, request_id, policy)))
    return [task.result() for task in sent]


async def _send(
    session: aiohttp.ClientSession, sample: Sample, run: str, request_id: str, policy: str | None
) -> Answer:
    headers = {"x-request-id": request_id, _OUTPUT_HEADER: str(sample.output_tokens)}
    if policy is not None:
        headers[POLICY_HEADER] = policy
    began = time.monotonic()
    first: float | None = None
    end = b""
    try:
        async with session.post(sample.path, json=sample.body(run), headers=headers) as response:
            async for chunk in response.content.iter_any():
                first = first or time.monotonic()
                end = (end + chunk)[-512:] if sample.stream else end + chunk
            problem = _problem(response.status, end, sample.stream)
    except (aiohttp.ClientError, TimeoutError) as error:
        problem = f"{type(error).__name__}: {error}"
    ttft = first - began if first is not None and sample.stream else None
    return Answer(request_id, ttft, time.monotonic() - began, problem)


def _problem(status: int, end: bytes, stream: bool) -> str:
    if status != 200:
        return f"status {status}: {end[:200].decode(errors='replace')}"
    if stream:
        return "" if end.rstrip().endswith(b"data: [DONE]") else "the stream ended early"
    try:
        return "" if json.loads(end)["choices"] else "no choices in the answer"
    except (ValueError, KeyError, TypeError):
        return "the answer is not a completion"

"""Whether a replica goes by priority, found out by which of two requests it takes first.

vLLM tells nowhere whether it runs ``--scheduling-policy priority``. Where it does not, it does not
care for ``priority``. So it is asked for a few tokens: while one answer is being generated, two
more requests come at almost the same time, so that both wait for the next step, and nearly always
begin in the same. First tokens of a step are sent in the order in which the engine took the
requests.
"""

import asyncio
from contextlib import AbstractAsyncContextManager

import aiohttp

from extproc.poll.scrape import answer
from extproc.request.endpoint import Endpoint

_PATH = Endpoint.COMPLETIONS.value
_ROUNDS, _MISSED, _WRONG = 10, 3, 1
"""In each round the later one has the higher priority once, and once the lower. So often it may not
be first where it should, for it came too late for the step; and so often it may be where it should
not, on a machine short of CPU. A vLLM without priorities misses all; were the order chance, as in
several servers behind one address, it would pass once in 500 times."""
_TOKENS = 16
"""Nobody waits for all of them: an answer whose client hangs up counts in no statistics."""
_LATER_FIRST, _LATER_LAST = (1, -1), (-1, 1)
"""Priorities, as vLLM has them: the lower goes first."""


async def goes_by_priority(session: aiohttp.ClientSession, replica: str, model: str) -> bool:
    """Whether the replica at ``ip:port`` takes the higher priority of two requests first.

    It takes prompts of a word, and a few tokens for each: three for each half of a round.
    """
    missed = wrong = 0
    for _ in range(_ROUNDS):
        missed += not await _later_is_first(session, replica, model, _LATER_FIRST)
        wrong += await _later_is_first(session, replica, model, _LATER_LAST)
        if missed > _MISSED or wrong > _WRONG:
            return False
    return True


async def _later_is_first(
    session: aiohttp.ClientSession, replica: str, model: str, priorities: tuple[int, int]
) -> bool:
    def asked(priority: int) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = {"model": model, "prompt": "Hello", "stream": True, "max_tokens": _TOKENS}
        return answer(session, replica, _PATH, {**body, "priority": priority, "ignore_eos": True})

    order: list[int] = []

    async def begins(number: int, priority: int) -> None:
        async with asked(priority) as response:
            await response.content.readany()
            order.append(number)

    async with asked(0) as busy:
        await busy.content.readany()
        await asyncio.gather(*(begins(*one) for one in enumerate(priorities)))
    return order[0] == 1

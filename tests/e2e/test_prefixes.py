"""A conversation goes where its prompt is cached, unless that costs more than it saves."""

import asyncio
import json

import pytest
import pytest_asyncio

from extproc.lab.harness.stack import MODEL
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]
HOST = "prefixes.example"

UNIT = 64  # tokens


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(pools: Stack) -> Stack:
    return pools


Messages = list[dict[str, str]]


def begun(topic: str, words: int = 3000) -> Messages:
    return [
        {"role": "system", "content": "You are a patient guide. " * 100},
        {"role": "user", "content": f"Tell me of the {topic}. " + f"{topic} " * words},
    ]


async def turn(
    client: Client, messages: Messages, tokens: int = 40, model: str = MODEL
) -> tuple[Answer, Messages]:
    """One more of a conversation, and the conversation after it; that the answer is short is known,
    so that a replica measured a little faster makes up for no prompt."""
    answer = await client.chat(tokens, messages=messages, model=model, max_tokens=tokens)
    assert answer.status == 200
    said = json.loads(answer.body)["choices"][0]["message"]["content"]
    following = {"role": "user", "content": "And then? " * 20}
    return answer, [*messages, {"role": "assistant", "content": said}, following]


def hits(answer: Answer) -> tuple[float, int]:
    return answer.decision["expected_cached_tokens"], answer.decision["outcome"]["cached_tokens"]


async def test_each_conversation_stays_where_its_prompt_is(client: Client) -> None:
    for topic in ("sea", "sky", "hills"):
        messages, served = begun(topic), set()
        for number in range(4):
            answer, messages = await turn(client, messages)
            served.add(answer.decision["replica"])
            expected, reported = hits(answer)
            prompt = answer.decision["outcome"]["prompt_tokens"]
            assert expected == pytest.approx(reported, abs=0.05 * prompt)
            if number:
                assert reported > 0.9 * (prompt - 2 * UNIT)
                assert "cached" in answer.decision["why"]
        assert len(served) == 1


async def test_the_answer_is_cached_where_it_was_given(client: Client) -> None:
    answer, messages = await turn(client, begun("moon"), tokens=600)
    answer, _ = await turn(client, messages, tokens=2)
    expected, reported = hits(answer)
    asked = answer.decision["outcome"]["prompt_tokens"]
    assert min(expected, reported) > asked - 3 * UNIT


async def test_who_caches_nothing_is_expected_to_find_nothing(client: Client) -> None:
    for number in range(2):
        answer, _ = await turn(client, begun("rain"), tokens=2, model="x")
        assert hits(answer) == (0, 0), number


async def test_who_does_not_tell_is_believed(client: Client) -> None:
    for number in range(3):
        answer, _ = await turn(client, begun("snow"), tokens=2, model="y")
        expected, reported = hits(answer)
        assert reported is None
        assert (expected > 0) == (number > 0)


async def test_a_conversation_leaves_when_waiting_costs_more(client: Client) -> None:
    """Long answers fill the replica that has the prompt; others prefill it anew, at once."""
    answer, messages = await turn(client, begun("wind", words=300), tokens=2)
    home = answer.decision["replica"]
    answer, messages = await turn(client, messages, tokens=2)
    assert answer.decision["replica"] == home
    asked = [
        asyncio.create_task(client.chat(messages=messages, max_tokens=2000, ignore_eos=True))
        for _ in range(60)
    ]
    await client.has_in_flight(len(asked))
    await client.slow(0.05)
    answers = await asyncio.gather(*asked)
    assert {one.status for one in answers} == {200}
    assert len({one.decision["replica"] for one in answers}) > 1

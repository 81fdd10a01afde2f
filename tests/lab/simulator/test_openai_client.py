"""OpenAI's Python client understands the replies."""

from collections.abc import AsyncIterator
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

TEXT_DELTA: Literal["response.output_text.delta"] = "response.output_text.delta"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def ai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openai_client_reads_completions(ai: AsyncOpenAI) -> None:
    answer = await ai.completions.create(
        model="tiny", prompt=["a", "b"], n=2, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == 4
    stream = await ai.completions.create(
        model="tiny", prompt="a", stream=True, extra_body={"ignore_eos": True}
    )
    assert len([chunk async for chunk in stream]) == 16


async def test_openai_client_reads_responses(ai: AsyncOpenAI) -> None:
    answer = await ai.responses.create(model="tiny", input="hello", max_output_tokens=5)
    assert answer.output_text
    async with ai.responses.stream(model="tiny", input="hello", max_output_tokens=5) as stream:
        deltas = [event.delta async for event in stream if event.type == TEXT_DELTA]
        final = await stream.get_final_response()
    assert final.output_text == answer.output_text == "".join(deltas)


async def test_openai_client_reads_embeddings(ai: AsyncOpenAI) -> None:
    packed = await ai.embeddings.create(model="tiny", input="hello")
    plain = await ai.embeddings.create(model="tiny", input="hello", encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding)


async def test_openai_client_reads_models_and_errors(ai: AsyncOpenAI) -> None:
    assert [model.id async for model in ai.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        await ai.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await ai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-1)

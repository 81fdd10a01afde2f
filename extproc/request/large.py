"""Bodies of which nothing is known but their length."""

from extproc.request.audio import audio_clips, audio_tokens
from extproc.request.bounds import MAX_SEQUENCES, MAX_TOKENS
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.tokens import TokenCounter

LARGE_BODY = 8 * 2**20
"""Bytes. Behind Envoy 1.40 a body of 8 MB reached the router after 30 ms, one of 40 MB after 240 to
380 ms; by default Envoy waits 200 ms."""

_MEDIUM = 2**20
"""Bytes: about one image."""


def of_length(
    endpoint: Endpoint, length: int, model: str, tokens: TokenCounter, stream: bool = False
) -> RequestProfile:
    """A request whose body holds media, for nobody writes that much: audio or images.

    Args:
        endpoint: what it asks for.
        length: bytes of its body.
        model: what it is for.
        tokens: knows how many tokens an image is taken for.
        stream: whether the answer is streamed, if that is known.
    """
    if endpoint.takes_audio:
        prompts, prompt_tokens = audio_clips(length), audio_tokens(length)
    else:
        prompts, prompt_tokens = 1, tokens.image_tokens(model) * -(-length // _MEDIUM)
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        prompt_tokens=min(prompt_tokens, MAX_TOKENS),
        prompt_bytes=0,
        output_bound=None if endpoint.decodes else 0,
        sequences=min(prompts, MAX_SEQUENCES) if endpoint.decodes else 0,
        stream=stream,
        longest_share=1 / prompts,
        stored=endpoint is Endpoint.RESPONSES,
    )

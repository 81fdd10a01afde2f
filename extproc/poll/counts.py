"""What a page of metrics says of an engine's work."""

from extproc.poll.metrics_text import EngineFigures
from extproc.predict.windows import EngineCounts


def engine_counts(figures: EngineFigures, at: float) -> EngineCounts:
    """The figures that step times are learned from, read at one time.

    vLLM says which share of its KV blocks is in use; the last block of a sequence is half full on
    average. Where blocks are large (128 tokens on CPUs) that is a quarter of what is in use, and
    its time would be taken for that of KV tokens.
    """
    unfilled = figures.running * figures.block_size / 2
    return EngineCounts(
        at=at,
        steps=figures.steps,
        computed_tokens=figures.prompt_tokens - figures.cached_tokens,
        # A step gives a sequence one token and those drafted before that were right.
        generated_tokens=figures.generated_tokens - figures.accepted_tokens,
        in_flight=figures.running + figures.waiting,
        kv_tokens=max(figures.kv_usage * figures.kv_tokens - unfilled, 0.0),
        finished=figures.finished,
    )

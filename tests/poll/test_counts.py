from pathlib import Path

import pytest

from extproc.poll.metrics_text import read_metrics

PAGES = Path(__file__).parents[1] / "data" / "vllm"


def test_the_last_block_of_a_sequence_is_taken_to_be_half_full() -> None:
    """64 blocks of 128 tokens; 4 sequences run."""
    figures = read_metrics((PAGES / "metrics-busy.txt").read_bytes())
    assert (figures.running, figures.block_size) == (4, 128)
    counts = figures.counts(at=1.0)
    in_blocks = figures.kv_usage * figures.kv_tokens
    assert counts.kv_tokens == pytest.approx(in_blocks - 4 * 64)


def test_an_idle_engine_holds_no_tokens() -> None:
    figures = read_metrics((PAGES / "metrics-idle.txt").read_bytes())
    assert figures.counts(at=1.0).kv_tokens == 0.0

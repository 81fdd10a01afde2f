"""Limits of the hardware profiles."""

import pytest

from extproc.predict.step import PROFILES

LARGE = {"llama-8b-h100", "llama-2-7b-h100", "qwen2.5-7b-h100", "llama-3.3-70b-4xh100"}


@pytest.mark.parametrize("name", PROFILES)
def test_limits_of_a_profile_are_the_defaults_of_vllm_on_its_gpu(name: str) -> None:
    limits = PROFILES[name].token_budget, PROFILES[name].max_num_seqs
    assert limits == ((8192, 1024) if name in LARGE else (2048, 256))

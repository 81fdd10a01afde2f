"""Keys of blocks of token ids: alike where all up to their end is alike, however they are made."""

import numpy as np
import pytest

from extproc.request.prefix import seed_of, token_keys

IDS = np.random.default_rng(1).integers(0, 150_000, 1_000).astype(np.uint32)
SEED = seed_of("")


def test_keys_of_a_part_follow_from_the_key_before_it() -> None:
    whole = token_keys(IDS, 16, SEED).tolist()
    assert len(whole) == len(set(whole)) == 62
    for cut in (1, 7, 61):
        first = token_keys(IDS[: cut * 16], 16, SEED).tolist()
        rest = token_keys(IDS[cut * 16 :].tolist(), 16, first[-1]).tolist()
        assert first + rest == whole


def test_a_key_stands_for_all_up_to_its_block() -> None:
    other = IDS.copy()
    other[100] += 1
    same = token_keys(IDS, 16, SEED) == token_keys(other, 16, SEED)
    assert same.tolist() == [True] * 6 + [False] * 56
    swapped = np.concatenate([IDS[16:32], IDS[:16], IDS[32:]])
    assert not (token_keys(IDS, 16, SEED) == token_keys(swapped, 16, SEED)).any()


def test_block_size_adapter_and_salt_set_keys_apart() -> None:
    keys = token_keys(IDS, 16, SEED)
    assert not np.isin(keys, token_keys(IDS, 16, seed_of("sql", ""))).any()
    assert not np.isin(keys, token_keys(IDS, 16, seed_of("", "sql"))).any()
    assert not np.isin(keys, token_keys(IDS, 32, SEED)).any()


@pytest.mark.parametrize("ids", [[], [1] * 15])
def test_what_fills_no_block_has_no_key(ids: list[int]) -> None:
    assert len(token_keys(ids, 16, SEED)) == 0


@pytest.mark.parametrize("ids", [[-1] * 16, [2**32] * 16, ["x"] * 16, [1.5, None] * 8])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    with pytest.raises((OverflowError, TypeError, ValueError)):
        token_keys(ids, 16, SEED)

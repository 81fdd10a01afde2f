"""KV blocks are evicted and hashed as in vLLM."""

from extproc.lab.simulator.blocks import BlockPool, chain_hashes


def test_blank_blocks_are_taken_before_cached_blocks() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(2)
    pool.release(0, pool.publish([11, 12]))
    pool.take(2)
    assert pool.cached([11, 12], limit=2) == 2


def test_eviction_begins_with_the_tail_of_the_oldest_prefix() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(4)
    first, second = pool.publish([11, 12]), pool.publish([21, 22])
    pool.release(0, first)
    pool.release(0, second)
    pool.take(1)
    assert pool.cached([11, 12], limit=2) == 1
    pool.take(1)
    assert pool.cached([11, 12], limit=2) == 0
    assert pool.cached([21, 22], limit=2) == 2


def test_hash_of_a_full_block_covers_all_before_it() -> None:
    first = chain_hashes(b"aaaabbbbcc", 4)
    second = chain_hashes(b"xxxxbbbb", 4)
    assert len(first) == 2
    assert first[0] == chain_hashes(b"aaaa", 4)[0]
    assert first[1] != second[1]

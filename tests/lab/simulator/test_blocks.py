from extproc.lab.simulator.blocks import BlockPool, chain_hashes


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(2)
    pool.release(0, pool.publish([11, 12]))
    pool.take(2)
    assert pool.cached([11, 12], limit=2) == 2


def test_eviction_takes_the_oldest_and_of_those_the_tail_first() -> None:
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


def test_chain_hashes_cover_what_precedes_and_only_full_blocks() -> None:
    one = chain_hashes(b"aaaabbbbcc", 4)
    other = chain_hashes(b"xxxxbbbb", 4)
    assert len(one) == 2
    assert one[0] == chain_hashes(b"aaaa", 4)[0]
    assert one[1] != other[1]

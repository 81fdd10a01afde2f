from extproc.lab.simulator.blocks import BlockPool, chain_hashes, trace_hashes


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


def test_trace_hashes_split_an_id_into_blocks() -> None:
    hashes = trace_hashes([7, 9], tokens=80, id_tokens=64, block_size=16)
    assert len(hashes) == len(set(hashes)) == 5
    assert trace_hashes([7, 8], tokens=100, id_tokens=64, block_size=16)[:4] == hashes[:4]
    assert trace_hashes([7], tokens=1000, id_tokens=64, block_size=16) == hashes[:4]

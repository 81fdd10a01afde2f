from extproc.simulator.blocks import BlockPool, chain_hashes, trace_hashes


def test_blocks_hold_tokens_rounded_up() -> None:
    pool = BlockPool(10, block_size=16)
    assert [pool.blocks_for(tokens) for tokens in (1, 16, 17, 32)] == [1, 1, 2, 2]


def test_released_blocks_are_found_again_and_count_as_free() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(3)
    held = pool.publish([11, 12])
    assert pool.usage == 0.75
    pool.release(1, held)
    assert (pool.free, pool.usage) == (4, 0)
    assert pool.cached([11, 12, 13], limit=3) == 2
    assert pool.cached([11, 12, 13], limit=1) == 1


def test_shared_blocks_are_in_use_until_the_last_user_lets_go() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(2)
    held = pool.publish([11, 12])
    pool.share([11])
    pool.release(0, held)
    assert pool.free == 3
    assert pool.idle([11, 12]) == 1
    pool.release(0, [11])
    assert pool.free == 4


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


def test_a_second_copy_of_a_block_stays_private() -> None:
    pool = BlockPool(4, block_size=16)
    pool.take(2)
    assert pool.publish([11]) == [11]
    assert pool.publish([11]) == []


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

import pytest

from ropewalk.cache.block_pool import BlockPool
from ropewalk.cache.types import InvariantError


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.take(1) is None
    pool.check()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_usable_blocks_is_refused(num_blocks):
    with pytest.raises(ValueError, match="2 or more"):
        BlockPool(num_blocks)


def test_take_is_all_or_nothing():
    pool = BlockPool(4)
    assert pool.take(2) == [1, 2]
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert pool.take(1) == [3]
    assert pool.take(0) == []


def test_the_block_freed_longest_ago_comes_first():
    pool = BlockPool(6)
    pool.take(5)
    assert pool.give_back([4, 2]) == [4, 2]
    assert pool.give_back([5]) == [5]
    pool.share([2])
    pool.give_back([2])
    assert pool.take(3) == [4, 5, 2]


@pytest.mark.parametrize("blocks", [[1, 1], [2], [0], [-1], [4]])
def test_giving_back_what_nobody_holds_raises(blocks):
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(InvariantError):
        pool.give_back(blocks)


@pytest.mark.parametrize("block", [0, -1, 4])
def test_only_usable_blocks_can_be_shared(block):
    with pytest.raises(InvariantError, match="not one of 1 to 3"):
        BlockPool(4).share([block])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._refs.__setitem__(0, 1),
        lambda pool: pool._refs.__setitem__(1, -1),
        lambda pool: pool._refs.__setitem__(3, 1),
        lambda pool: pool._free.pop(3),
        lambda pool: pool._free.__setitem__(1, None),
        lambda pool: pool._free.__setitem__(0, None),
    ],
)
def test_check_sees_damage(damage):
    pool = BlockPool(4)
    pool.take(1)
    pool.check()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check()

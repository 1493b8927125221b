"""The KV blocks of a simulated rank."""

from lockstep.sim.pool import Holding, KVPool


def taken(pool: KVPool, tokens: list[int]) -> Holding:
    """Blocks for a prompt that is then computed."""
    holding = pool.take(tokens, None)
    assert holding is not None
    pool.name(holding, tokens, None)
    return holding


def test_blocks_are_finite() -> None:
    """What does not fit waits, and fits once blocks were given back."""
    pool = KVPool(4, 4, prefix_caching=False)
    first = taken(pool, list(range(12)))
    assert pool.usage == 0.75
    assert pool.take(list(range(5)), None) is None
    pool.release(first)
    assert pool.usage == 0
    assert pool.take(list(range(16)), None) is not None


def test_a_prefix_is_found_again() -> None:
    """Full blocks only, while its holder runs and after; another text finds nothing, nor another salt."""
    pool = KVPool(8, 4, prefix_caching=True)
    first = taken(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    while_held = pool.take([1, 2, 3, 4, 5, 6, 7, 8, 20], None)
    assert while_held is not None
    assert while_held.cached_tokens == 8
    pool.release(first)
    pool.release(while_held)
    for tokens, salt, cached in (
        ([1, 2, 3, 4, 0, 6], None, 4),
        ([2, 2, 3, 4, 5], None, 0),
        ([1, 2, 3, 4, 5], "s", 0),
    ):
        found = pool.take(tokens, salt)
        assert found is not None
        assert found.cached_tokens == cached
        pool.release(found)


def test_the_last_token_is_always_computed() -> None:
    """Of a prompt that is cached whole, the last block is taken anew."""
    pool = KVPool(8, 4, prefix_caching=True)
    pool.release(taken(pool, list(range(8))))
    again = pool.take(list(range(8)), None)
    assert again is not None
    assert again.cached_tokens == 4


def test_what_was_used_least_lately_goes_first() -> None:
    """A cached block makes room when there is no other, and held ones never do."""
    pool = KVPool(3, 4, prefix_caching=True)
    for first in (10, 20, 30):
        pool.release(taken(pool, [first, 1, 1, 1]))
    again = pool.take([10, 1, 1, 1, 5], None)
    assert again is not None
    assert again.cached_tokens == 4
    pool.release(again)
    found = [pool.take([first, 1, 1, 1, 5], None) for first in (30, 20)]
    assert [holding.cached_tokens for holding in found if holding] == [4]  # for 20 there are too few blocks


def test_a_holding_grows_with_its_answer() -> None:
    """By whole blocks, until there are none."""
    pool = KVPool(2, 4, prefix_caching=False)
    holding = pool.take([1, 2, 3], None)
    assert holding is not None
    assert pool.grow(holding, 8)
    assert pool.usage == 1
    assert not pool.grow(holding, 9)


def test_equal_prompts_computed_side_by_side_share_their_blocks_afterwards() -> None:
    """Neither found the other's; one block of each name is left, and all blocks come back."""
    pool = KVPool(4, 4, prefix_caching=True)
    one, two = pool.take([1, 2, 3, 4], None), pool.take([1, 2, 3, 4], None)
    assert one is not None
    assert two is not None
    pool.name(one, [1, 2, 3, 4], None)
    pool.name(two, [1, 2, 3, 4], None)
    assert pool.usage == 0.25
    pool.release(one)
    pool.release(two)
    assert pool.usage == 0

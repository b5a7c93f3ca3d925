"""All ranks together hold each token exactly once, in blocks that they fill from the left."""

import pytest

from paxkv.errors import ConfigError
from paxkv.kv_cache.context_parallel import ContextParallelLayout, TokenPlace

BLOCK_SIZE = 8


def layouts():
    return [
        ContextParallelLayout(block_size=BLOCK_SIZE, world_size=world_size, interleave=interleave)
        for world_size in (1, 2, 4, 8)
        for interleave in (1, 2, 4, BLOCK_SIZE)
    ]


def test_example_by_hand():
    layout = ContextParallelLayout(block_size=4, world_size=2, interleave=2)
    places = [layout.place_of(position) for position in range(9)]
    assert [place.rank for place in places] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert [place.offset for place in places] == [0, 1, 0, 1, 2, 3, 2, 3, 0]
    assert [place.block_idx for place in places] == [0] * 8 + [1]
    assert [layout.num_local_tokens(n, 0) for n in range(9)] == [0, 1, 2, 2, 2, 3, 4, 4, 4]
    assert [layout.num_local_tokens(n, 1) for n in range(9)] == [0, 0, 0, 1, 2, 2, 2, 3, 4]
    assert [layout.num_blocks(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_simulated_ranks_hold_each_token_exactly_once(layout):
    """Decodes token by token into ranks (plain lists) and checks the place of each token."""
    ranks = [[] for _ in range(layout.world_size)]
    turn = 0
    for position in range(layout.virtual_block_size * 2 + 3):
        # The simple rule: the same rank for `interleave` tokens, then the next rank.
        if position and position % layout.interleave == 0:
            turn = (turn + 1) % layout.world_size
        ranks[turn].append(position)
        for rank, held in enumerate(ranks):
            assert layout.num_local_tokens(position + 1, rank) == len(held)
            num_used_blocks = -(-len(held) // BLOCK_SIZE)
            assert num_used_blocks <= layout.num_blocks(position + 1) <= num_used_blocks + 1
        assert -(-len(ranks[0]) // BLOCK_SIZE) == layout.num_blocks(position + 1)
    for rank, held in enumerate(ranks):
        for own_position, position in enumerate(held):
            block_idx, offset = divmod(own_position, BLOCK_SIZE)
            place = TokenPlace(rank=rank, block_idx=block_idx, offset=offset)
            assert layout.place_of(position) == place
            assert layout.position_of(place) == position
            assert position // layout.virtual_block_size == block_idx


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 8, "world_size": 2, "interleave": 3}, "must divide block_size=8"),
        ({"block_size": 8, "world_size": 2, "interleave": 16}, "must divide block_size=8"),
        ({"block_size": 8, "world_size": 0}, "at least 1"),
    ],
)
def test_an_impossible_layout_raises_config_error(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ContextParallelLayout(**sizes)

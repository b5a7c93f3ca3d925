"""Context parallelism: the rank and the slot of each token of a sequence."""

import dataclasses

from paxkv.contracts.kv_cache_spec import cdiv
from paxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlace:
    """The place of a token's key and value."""

    rank: int  # in [0, world_size)
    block_idx: int  # entry of the request's block table
    offset: int  # in [0, block_size), inside that block on that rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelLayout:
    """Distributes a sequence's tokens over ranks: each rank in turn gets `interleave` tokens.

    All ranks have the same block table. Each entry stands for one block on every rank. Together
    these form a virtual block, which covers `block_size * world_size` positions.

    Example, block_size 4, world_size 2, interleave 2, the virtual block of positions 0..7:
        position  0  1  2  3  4  5  6  7
        rank      0  0  1  1  0  0  1  1
        offset    0  1  0  1  2  3  2  3

    Source: vLLM `v1/worker/block_table.py`.
    """

    block_size: int
    world_size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.world_size, self.interleave) < 1:
            raise ConfigError(f"sizes of a context-parallel layout must be at least 1, got {self}.")
        if self.block_size % self.interleave:
            raise ConfigError(
                f"interleave={self.interleave} must divide block_size={self.block_size}: a "
                "rank's share of a virtual block fills its block."
            )

    @property
    def virtual_block_size(self) -> int:
        """Number of positions that one entry of a block table covers."""
        return self.block_size * self.world_size

    def num_blocks(self, num_tokens: int) -> int:
        """Number of block table entries, and of blocks on each rank (the last may be empty)."""
        return cdiv(num_tokens, self.virtual_block_size)

    def num_local_tokens(self, num_tokens: int, rank: int) -> int:
        """Number of the first `num_tokens` tokens that `rank` holds."""
        num_rounds, num_left = divmod(num_tokens, self.world_size * self.interleave)
        in_last_round = min(max(num_left - rank * self.interleave, 0), self.interleave)
        return num_rounds * self.interleave + in_last_round

    def place_of(self, position: int) -> TokenPlace:
        """The place of the token at `position`."""
        stripe_idx, place_in_stripe = divmod(position, self.interleave)
        own_stripe_idx, rank = divmod(stripe_idx, self.world_size)
        block_idx, offset = divmod(
            own_stripe_idx * self.interleave + place_in_stripe, self.block_size
        )
        return TokenPlace(rank=rank, block_idx=block_idx, offset=offset)

    def position_of(self, place: TokenPlace) -> int:
        """The position of the token at `place`; the inverse of `place_of`."""
        own_position = place.block_idx * self.block_size + place.offset
        own_stripe_idx, place_in_stripe = divmod(own_position, self.interleave)
        stripe_idx = own_stripe_idx * self.world_size + place.rank
        return stripe_idx * self.interleave + place_in_stripe

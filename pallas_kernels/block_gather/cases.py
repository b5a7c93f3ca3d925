"""Named example inputs of `block_gather`, and of `block_scatter`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGatherCase:
    """Sizes of one example; padding is spread among the real blocks.

    Args:
        num_ids: Number of blocks to draw, all different.
    """

    name: str
    num_ids: int
    num_padding_ids: int = 0
    num_rows: int = 3
    num_blocks: int = 12
    block_dims: tuple[int, ...] = (2, 2, 8, 16)  # by default K and V of 2 KV heads
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGatherInputs:
    """Arguments of `block_gather`, and the values for `block_scatter`."""

    pages: jax.Array  # [num_rows, num_blocks, *block_dims]
    block_ids: jax.Array  # i32[num_ids]
    values: jax.Array  # [num_rows, num_ids, *block_dims]


CASES: tuple[BlockGatherCase, ...] = (
    BlockGatherCase(name="one_block", num_ids=1),
    BlockGatherCase(name="one_block_one_row", num_ids=1, num_rows=1),
    BlockGatherCase(name="some_with_padding", num_ids=5, num_padding_ids=3),
    BlockGatherCase(name="every_block", num_ids=12),
    BlockGatherCase(name="padding_only", num_ids=0, num_padding_ids=2),
    BlockGatherCase(name="one_padding_one_row", num_ids=0, num_padding_ids=1, num_rows=1),
    BlockGatherCase(name="raw_words", num_ids=4, num_padding_ids=1, block_dims=(512,)),
    BlockGatherCase(name="latents", num_ids=2, num_padding_ids=1, block_dims=(1, 8, 576)),
    BlockGatherCase(name="uint16_words", num_ids=4, block_dims=(1024,), dtype="uint16"),
    BlockGatherCase(name="bfloat16", num_ids=4, num_padding_ids=2, dtype="bfloat16"),
    BlockGatherCase(name="int8", num_ids=4, num_padding_ids=2, dtype="int8"),
    BlockGatherCase(name="float8", num_ids=4, num_padding_ids=2, dtype="float8_e4m3fn"),
)


# Ranges of drawn numbers; for other dtypes, they are between -1 and 1.
_RANGES = {"uint16": (0, 2**16), "int8": (-127, 127), "float8_e4m3fn": (-448, 448)}


def build_inputs(case: BlockGatherCase) -> BlockGatherInputs:
    """Draws pages, blocks and their places; padding has `num_blocks` and more."""
    rng = np.random.default_rng(0)
    num_all = case.num_ids + case.num_padding_ids
    block_ids_np = case.num_blocks + np.arange(num_all)
    is_real = rng.permutation(num_all)[: case.num_ids]
    block_ids_np[is_real] = rng.permutation(case.num_blocks)[: case.num_ids]

    def draw(num_blocks: int) -> jax.Array:
        shape = (case.num_rows, num_blocks, *case.block_dims)
        low, high = _RANGES.get(case.dtype, (-1.0, 1.0))
        return jax.device_put(rng.uniform(low, high, shape).astype(jnp.dtype(case.dtype)))

    return BlockGatherInputs(
        pages=draw(case.num_blocks),
        block_ids=jax.device_put(block_ids_np.astype(np.int32)),
        values=draw(num_all),
    )

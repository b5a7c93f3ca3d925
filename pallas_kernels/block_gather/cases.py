"""Named example inputs of `block_gather`, and of `block_scatter`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised_cache import LARGEST_STORED


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGatherCase:
    """Sizes of one example; padding is spread among the real blocks.

    Args:
        num_ids: Blocks to draw, no two alike.
    """

    name: str
    num_ids: int
    num_padding_ids: int = 0
    num_rows: int = 3
    num_blocks: int = 12
    num_kv_heads: int = 2
    block_size: int = 8
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGatherInputs:
    """Arguments of `block_gather`, and what `block_scatter` takes beside them."""

    k_cache: jax.Array  # [num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array  # [num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    block_ids: jax.Array  # i32[num_ids]
    k_blocks: jax.Array  # [num_rows, num_ids, num_kv_heads, block_size, head_dim]
    v_blocks: jax.Array  # [num_rows, num_ids, num_kv_heads, block_size, v_head_dim]


CASES: tuple[BlockGatherCase, ...] = (
    BlockGatherCase(name="one_block", num_ids=1),
    BlockGatherCase(name="one_block_one_row", num_ids=1, num_rows=1),
    BlockGatherCase(name="some_with_padding", num_ids=5, num_padding_ids=3),
    BlockGatherCase(name="every_block", num_ids=12),
    BlockGatherCase(name="padding_only", num_ids=0, num_padding_ids=2),
    BlockGatherCase(name="one_padding_one_row", num_ids=0, num_padding_ids=1, num_rows=1),
    BlockGatherCase(name="v_narrower_than_k", num_ids=4, head_dim=64, v_head_dim=16),
    BlockGatherCase(name="wide_heads", num_ids=2, num_kv_heads=1, head_dim=576, v_head_dim=512),
    BlockGatherCase(
        name="mla_without_v",
        num_ids=2,
        num_padding_ids=1,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=0,
    ),
    BlockGatherCase(name="bfloat16", num_ids=4, num_padding_ids=2, dtype="bfloat16"),
    BlockGatherCase(name="int8", num_ids=4, num_padding_ids=2, dtype="int8"),
    BlockGatherCase(name="float8", num_ids=4, num_padding_ids=2, dtype="float8_e4m3fn"),
)


def build_inputs(case: BlockGatherCase) -> BlockGatherInputs:
    """Draws caches, blocks and their places; padding has `num_blocks` and more."""
    rng = np.random.default_rng(0)
    num_all = case.num_ids + case.num_padding_ids
    block_ids_np = case.num_blocks + np.arange(num_all)
    is_real = rng.permutation(num_all)[: case.num_ids]
    block_ids_np[is_real] = rng.permutation(case.num_blocks)[: case.num_ids]

    def draw(num_blocks: int, head_dim: int) -> jax.Array:
        shape = (case.num_rows, num_blocks, case.num_kv_heads, case.block_size, head_dim)
        largest = LARGEST_STORED.get(case.dtype, 1.0)
        return jnp.asarray(rng.uniform(-largest, largest, shape), jnp.float32).astype(case.dtype)

    return BlockGatherInputs(
        k_cache=draw(case.num_blocks, case.head_dim),
        v_cache=draw(case.num_blocks, case.v_head_dim),
        block_ids=jnp.asarray(block_ids_np, jnp.int32),
        k_blocks=draw(num_all, case.head_dim),
        v_blocks=draw(num_all, case.v_head_dim),
    )

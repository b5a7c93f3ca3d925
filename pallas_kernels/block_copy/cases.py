"""Named example inputs of `block_copy`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopyCase:
    """Sizes of one example; padding is spread among the real copies.

    Args:
        copies: (source, target) of each copy, or a number of copies to draw.
    """

    name: str
    copies: tuple[tuple[int, int], ...] | int
    num_padding_copies: int = 0
    num_rows: int = 3
    num_blocks: int = 12
    block_dims: tuple[int, ...] = (2, 2, 8, 16)  # by default K and V of 2 KV heads
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopyInputs:
    """Arguments of `block_copy`."""

    pages: jax.Array  # [num_rows, num_blocks, *block_dims]
    source_block_ids: jax.Array  # i32[num_copies]
    target_block_ids: jax.Array  # i32[num_copies]


CASES: tuple[BlockCopyCase, ...] = (
    BlockCopyCase(name="one_copy", copies=((3, 5),)),
    BlockCopyCase(name="one_copy_one_row", copies=((3, 5),), num_rows=1),
    BlockCopyCase(name="chain", copies=((1, 2), (2, 3), (3, 4)), num_padding_copies=1),
    BlockCopyCase(name="swap", copies=((4, 7), (7, 4))),
    BlockCopyCase(name="zeros_and_one_source_for_many", copies=((0, 1), (0, 2), (9, 3), (9, 4))),
    BlockCopyCase(name="onto_itself", copies=((6, 6), (11, 0)), num_padding_copies=2),
    BlockCopyCase(name="every_block", copies=12, num_padding_copies=4),
    BlockCopyCase(name="padding_only", copies=(), num_padding_copies=4),
    BlockCopyCase(name="one_padding", copies=(), num_padding_copies=1),
    BlockCopyCase(name="raw_words", copies=5, num_padding_copies=3, block_dims=(512,)),
    BlockCopyCase(name="latents", copies=3, block_dims=(1, 8, 576)),
    BlockCopyCase(name="bfloat16", copies=5, dtype="bfloat16"),
    BlockCopyCase(name="uint16_words", copies=5, block_dims=(1024,), dtype="uint16"),
)


def build_inputs(case: BlockCopyCase) -> BlockCopyInputs:
    """Draws pages and copies; padding has `num_blocks` and more as its target."""
    rng = np.random.default_rng(0)
    if isinstance(case.copies, int):
        sources = rng.integers(0, case.num_blocks, case.copies)
        copies = list(zip(sources, rng.permutation(case.num_blocks), strict=False))
    else:
        copies = list(case.copies)
    copies += [(case.num_blocks, case.num_blocks + i) for i in range(case.num_padding_copies)]
    order = rng.permutation(len(copies))
    copies_np = np.array(copies, np.int32).reshape(-1, 2)[order]

    shape = (case.num_rows, case.num_blocks, *case.block_dims)
    largest = 2**16 if case.dtype == "uint16" else 1
    return BlockCopyInputs(
        pages=jax.device_put(rng.uniform(0, largest, shape).astype(jnp.dtype(case.dtype))),
        source_block_ids=jax.device_put(copies_np[:, 0]),
        target_block_ids=jax.device_put(copies_np[:, 1]),
    )

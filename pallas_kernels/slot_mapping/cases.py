"""Named example inputs of `slot_mapping`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels.cache_layout import pad_slot

NUM_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMappingCase:
    """Sizes of one example.

    Args:
        requests: (first position, number of tokens) of each request.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    num_padding_tokens: int = 0
    num_groups: int = 1
    block_size: int = 16
    max_blocks_per_req: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMappingInputs:
    """Arguments of `slot_mapping`."""

    positions: jax.Array  # i32[num_groups, num_tokens]
    block_tables: jax.Array  # i32[num_groups, num_reqs, max_blocks_per_req]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    block_size: int
    pad_slot: int

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.positions, self.block_tables, self.query_start_loc

    @property
    def options(self) -> dict[str, int]:
        """The static arguments, by name."""
        return {"block_size": self.block_size, "pad_slot": self.pad_slot}


CASES: tuple[SlotMappingCase, ...] = (
    SlotMappingCase(name="one_prompt", requests=((0, 37),), block_size=8),
    SlotMappingCase(name="decode_only", requests=((5, 1), (16, 1), (127, 1)), block_size=16),
    SlotMappingCase(
        name="mixed_with_empty_requests_and_padding",
        requests=((0, 0), (30, 20), (0, 0), (0, 0), (63, 1), (0, 9), (0, 0)),
        num_padding_tokens=6,
        block_size=32,
    ),
    SlotMappingCase(
        name="three_groups",
        requests=((12, 5), (40, 1)),
        num_padding_tokens=2,
        num_groups=3,
        block_size=64,
    ),
    SlotMappingCase(name="padding_only", requests=((0, 0), (0, 0)), num_padding_tokens=8),
)


def build_inputs(case: SlotMappingCase) -> SlotMappingInputs:
    """Draws block tables without repetition, so that every token's slot is its own."""
    rng = np.random.default_rng(0)
    num_reqs = len(case.requests)
    num_blocks = 1 + case.num_groups * num_reqs * case.max_blocks_per_req
    block_ids = 1 + rng.permutation(num_blocks - 1)
    positions_np = np.concatenate(
        [np.arange(first, first + num_tokens) for first, num_tokens in case.requests]
        + [np.full(case.num_padding_tokens, -1)]
    )
    tables_shape = (case.num_groups, num_reqs, case.max_blocks_per_req)
    query_start_loc_np = np.cumsum([0] + [num_tokens for _, num_tokens in case.requests])
    return SlotMappingInputs(
        positions=jax.device_put(np.tile(positions_np, (case.num_groups, 1)).astype(np.int32)),
        block_tables=jax.device_put(block_ids.reshape(tables_shape).astype(np.int32)),
        query_start_loc=jax.device_put(np.asarray(query_start_loc_np, np.int32)),
        block_size=case.block_size,
        pad_slot=pad_slot(NUM_ROWS, num_blocks, case.block_size),
    )

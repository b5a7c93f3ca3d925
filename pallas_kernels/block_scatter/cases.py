"""Named example inputs of `block_scatter`, the same as for `block_gather`."""

from pallas_kernels.block_gather.cases import (
    CASES,
    BlockGatherCase,
    BlockGatherInputs,
    build_inputs,
)

__all__ = ["CASES", "BlockGatherCase", "BlockGatherInputs", "build_inputs"]

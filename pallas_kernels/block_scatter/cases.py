"""Named example inputs of `block_scatter`: those of `block_gather`, the way back."""

from pallas_kernels.block_gather.cases import (
    CASES,
    BlockGatherCase,
    BlockGatherInputs,
    build_inputs,
)

__all__ = ["CASES", "BlockGatherCase", "BlockGatherInputs", "build_inputs"]

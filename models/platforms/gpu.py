"""`GPU`: NVIDIA's, through CUDA."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from models.platforms.base import Platform

# JAX reads this when it first uses a GPU: the share of the GPU's memory that it takes.
SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class GPU(Platform):
    """Layers are unrolled: a step is launched as one graph, and few steps are compiled."""

    name: ClassVar[str] = "gpu"

    @property
    def fuses_state_writes(self) -> bool:
        return True

    def compiler_options(
        self, dtypes: Collection[str], *, batch_invariant: bool = False
    ) -> dict[str, str]:
        return {
            # XLA's defaults for CUDA graphs, and WHILE: the host then launches a burst once, and
            # does not wait for the condition of its loop.
            "xla_gpu_enable_command_buffer": "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
            "DYNAMIC_SLICE_FUSION,FUSION,WHILE",
            # By default, XLA joins products with the same left operand, and copies their weights
            # (q, k and v; gate and up) into one array in every step.
            "xla_gpu_dot_merger_threshold_mb": "0",
        }

    def compiler_options_of_processes(self) -> dict[str, str]:
        # By default, each process tunes a part of every program and waits for the others. A process
        # that loads the program from disk would not take part.
        return {"xla_gpu_shard_autotuning": "False"}

    def total_memory_bytes(self, limit_bytes: int) -> int:
        # The limit is a share of the memory, which is set before JAX starts.
        return int(limit_bytes / float(os.environ.get(SHARE_VARIABLE, DEFAULT_SHARE)))

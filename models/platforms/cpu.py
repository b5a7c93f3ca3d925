"""`CPU`: XLA compiles for the processor that this process runs on."""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models.cache.format import Pages
from models.config.model_config import ModelDtype
from models.decoders.layer_loop import PlacedLayer, run_in_loop
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.platforms.base import Platform, TiedHead
from models.platforms.host_memory import available_memory_bytes, free_swap_bytes
from models.platforms.huge_pages import use_huge_pages
from models.platforms.lazy_zeros import lazy_zeros
from models.platforms.processor import (
    instruction_sets,
    num_cores,
    num_threads,
    processor_identity,
)
from models.platforms.put_weight import cast_on_host

# The work of YNNPACK; XLA's default is more than these two. Its reductions compile faster.
_YNNPACK_DOES = "xla_cpu_experimental_ynn_fusion_type"
_NOTHING, _REDUCTIONS = "", "LIBRARY_FUSION_TYPE_REDUCE"


@dataclass(frozen=True, slots=True)
class CPU(Platform):
    """Few programs with loops over layers, because compiling them takes most of a start.

    Args:
        num_threads: The number of threads that XLA computes with.
        instruction_sets: As Linux names them, like "avx2".
    """

    num_threads: int
    instruction_sets: frozenset[str]

    name: ClassVar[str] = "cpu"
    # Reading blocks of 64 in random order is faster than reading blocks of 16.
    block_size: ClassVar[int] = 64
    shares_programs: ClassVar[bool] = True
    samples_in_chunks: ClassVar[bool] = True
    # A widened panel then stays in the level 2 cache: 1,024 inputs are 512 KiB.
    scaled_panel_width: ClassVar[int | None] = 128
    stacks_layers: ClassVar[bool] = True
    # Twice what the largest step of 28 layers took.
    compile_bytes: ClassVar[int] = 2**29

    @classmethod
    def of_this_machine(cls) -> "CPU":
        return cls(num_threads=num_threads(), instruction_sets=instruction_sets())

    def step_clock(self) -> float:
        """Processor time of this process, which other processes of a busy machine do not change."""
        return time.process_time()

    def weight_dtype(self, own: ModelDtype) -> ModelDtype:
        """float32, because XLA:CPU is slow in 16 bits."""
        return "float32"

    def kv_cache_dtypes(self, model_dtype: str) -> tuple[str, ...]:
        """float32 for every dtype of the model, or 16 bits."""
        return ("float32", "float16", "bfloat16")

    def page_dtype(self, kv_dtype: str) -> str:
        """Integers in place of 16-bit floats.

        XLA:CPU computes a scatter of bfloat16 in float32, and copies the whole cache for it.
        """
        return "uint16" if kv_dtype in ("float16", "bfloat16") else kv_dtype

    def expert_dtype(self, dtype: str) -> str:
        """Integers for 16-bit floats. XLA:CPU would convert floats of all experts to use one."""
        return self.page_dtype(dtype)

    def compiler_options(
        self, dtypes: Collection[str], *, batch_invariant: bool = False
    ) -> dict[str, str]:
        """As `Platform.compiler_options`.

        XLA's own products sum some rows in another order than others, so batch-invariant programs
        keep YNNPACK, which does not.
        """
        # XLA's default level is 2. Level 1 compiles faster, and steps take as long
        # (docs/design/cpu.md).
        options = {"xla_backend_optimization_level": "1"}
        if set(dtypes) == {"float32"} and not batch_invariant:
            options |= _float32_products(self.num_threads, self.instruction_sets)
        return options

    def tied_head(self, dtype: str, *, quantizes: bool, changes_kernels: bool) -> TiedHead:
        """As `Platform.tied_head`.

        A quantized head is also the embedding, because a second array of floats would need more
        memory than all layers of a small model.

        YNNPACK multiplies with rows faster than with columns. XLA's own products take many times
        as long with rows. `docs/design/cpu.md` has the figures.
        """
        if quantizes:
            return "columns"
        if changes_kernels:
            return "copy"
        uses_ynnpack = _YNNPACK_DOES not in self.compiler_options({dtype})
        return "rows" if uses_ynnpack and "avx512f" in self.instruction_sets else "columns"

    def column_panel_width(self, *, batch_invariant: bool = False) -> int | None:
        """Columns of the panels in which float32 kernels are stored (`PanelKernel`).

        None keeps kernels whole, in three cases: several cores share the columns of each kernel;
        YNNPACK multiplies, which is slow with panels; or panels gain nothing, as with AVX-512 and
        without avx512_fp16. `docs/design/cpu.md` has the gain with AVX2.
        """
        if self.num_threads > 1 or batch_invariant:
            return None
        if "avx512f" in self.instruction_sets:
            return 512 if "avx512_fp16" in self.instruction_sets else None
        return 256 if "avx2" in self.instruction_sets else None

    def run_layers(
        self,
        layers: Sequence[PlacedLayer],
        carry: Carry,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[Carry, Pages]:
        return run_in_loop(layers, carry, pages, context)

    def put_weight(
        self,
        weight_np: np.ndarray,
        dtype: jnp.dtype,
        *,
        is_transposed: bool,
        device: jax.Device | None = None,
    ) -> jax.Array:
        """As `Platform.put_weight`. The host casts every weight, into huge pages."""
        return cast_on_host(weight_np, dtype, is_transposed=is_transposed, device=device)

    def prepare_arrays(self, arrays: Iterable[jax.Array]) -> None:
        use_huge_pages(arrays)

    def allocate_zeros(
        self, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding
    ) -> jax.Array:
        """As `Platform.allocate_zeros`. Linux provides a page when a step first writes to it."""
        return lazy_zeros(shape, dtype, sharding)

    def free_bytes_for_weights(self, devices: list[jax.Device]) -> int | None:
        """As `Platform.free_bytes_for_weights`. Simulated devices share the host's memory."""
        return (available_memory_bytes() + free_swap_bytes()) // len(devices)

    def free_host_bytes(self) -> int | None:
        return available_memory_bytes()

    def identity(self) -> dict[str, str]:
        return {
            "processor": processor_identity(),
            # XLA splits loops over the number of threads that there were when it compiled.
            "processor cores": f"{num_cores()}, NPROC {os.environ.get('NPROC', 'not set')}",
        }


def _float32_products(num_threads: int, instruction_sets: Collection[str]) -> dict[str, str]:
    """The options without products by YNNPACK, if XLA's own products take less time.

    `docs/design/cpu.md` has the figures. Processors without AVX2 were not measured.
    """
    if "avx512f" in instruction_sets:
        return {_YNNPACK_DOES: _NOTHING} if num_threads == 1 else {}
    if "avx2" in instruction_sets:
        return {_YNNPACK_DOES: _REDUCTIONS}
    return {}

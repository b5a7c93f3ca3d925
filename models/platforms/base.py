"""`Platform`: all choices that depend on the processor, here with values for any processor."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from models.cache.format import Pages
from models.config.model_config import ModelDtype
from models.decoders.layer_loop import PlacedLayer, run_in_turn
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.platforms.host_memory import available_memory_bytes
from models.platforms.processor import num_cores
from models.platforms.put_weight import cast_on_device, cast_on_host

# Lowering takes about a quarter of a program's time, and programs are lowered one after the other.
# More threads would mostly wait for the next lowered program.
_MAX_COMPILE_THREADS = 8
# The largest weight, in numbers, that the host casts and transposes.
_MAX_HOST_CAST = 2**20


# How a model stores an embedding that is also its vocabulary head:
# - rows: one array [vocab, hidden], as in the checkpoint
# - columns: one array or `StoredKernel` [hidden, vocab], whose columns the embedding reads
# - copy: both arrays; the second one is the kernel of a `Linear`
TiedHead = Literal["rows", "columns", "copy"]


@dataclass(frozen=True, slots=True)
class Platform:
    """Frozen and hashable. A class for each kind of processor overrides the choices that differ.

    No other code asks which processor it runs on, except `pallas_kernels/target.py` and
    `dispatch.py`, which choose the bodies of ops.
    """

    name: ClassVar[str] = "other"
    # Token positions in a block, by default.
    block_size: ClassVar[int] = 16
    # The width of a stored head is a multiple of this.
    head_dim_step: ClassVar[int] = 1
    # Whether one program serves several numbers of tokens (`ForwardBatch.widths`), so that fewer
    # programs are compiled.
    shares_programs: ClassVar[bool] = False
    # Whether the sampler draws tokens of a few rows at a time. On accelerators, all rows at once
    # are faster, because the host would wait for a loop's condition.
    samples_in_chunks: ClassVar[bool] = False
    # Columns of a kernel of 4 or 8 bits that a product widens at a time; None widens all at once.
    scaled_panel_width: ClassVar[int | None] = None
    # Whether the kernels of experts, and quantized kernels, of several layers are in one array.
    stacks_layers: ClassVar[bool] = False
    # Host memory that compiling one program may take: several times what was measured
    # (`docs/design/runner-and-programs.md`).
    compile_bytes: ClassVar[int] = 2**30

    def step_clock(self) -> float:
        """A clock in seconds, to compare how long steps take."""
        return time.perf_counter()

    def weight_dtype(self, own: ModelDtype) -> ModelDtype:
        """The default dtype of loaded weights.

        Args:
            own: The dtype that the checkpoint states.
        """
        return own

    def kv_cache_dtypes(self, model_dtype: str) -> tuple[str, ...]:
        """Dtypes that keys and values may be stored in; the first is the default.

        Args:
            model_dtype: The dtype of the model's weights.
        """
        return (model_dtype,)

    def page_dtype(self, kv_dtype: str) -> str:
        """The dtype of the array that keeps keys and values of `kv_dtype`."""
        return kv_dtype

    def expert_dtype(self, dtype: str) -> str:
        """The dtype of the array that keeps the kernels of experts, whose dtype is `dtype`."""
        return dtype

    def page_shape(self, num_elements: int) -> tuple[int, ...]:
        """The trailing axes of the array of pages, for `num_elements` of `page_dtype` per page."""
        return (num_elements,)

    def tied_head(self, dtype: str, *, quantizes: bool, changes_kernels: bool) -> TiedHead:
        """How an embedding that is also the vocabulary head is stored.

        Args:
            dtype: The dtype of the embedding.
            quantizes: Whether kernels of `Linear` are quantized to `ScaledKernel`. An embedding
                that is stored in columns is then quantized too.
            changes_kernels: Whether kernels of `Linear` have another dtype than the embedding, or
                are stored in panels.
        """
        return "rows"

    def compiler_options(
        self, dtypes: Collection[str], *, batch_invariant: bool = False
    ) -> dict[str, str]:
        """Names and values of XLA's options.

        Args:
            dtypes: The dtypes of the model's weights.
            batch_invariant: Whether a row's products must not depend on its place among the rows.
        """
        return {}

    def compiler_options_of_processes(self) -> dict[str, str]:
        """Further options of XLA, if the devices are in several processes."""
        return {}

    def num_compile_threads(self) -> int:
        """Programs that are compiled at a time: one per core, if the host's memory allows it."""
        num_fitting = available_memory_bytes() // self.compile_bytes
        return max(1, min(num_cores(), num_fitting, _MAX_COMPILE_THREADS))

    @property
    def fuses_state_writes(self) -> bool:
        """Whether XLA can compute a new state in the same kernel that writes it to the pages.

        Formats of states then view the pages as numbers of the state's dtype. XLA must do this
        without a copy of the pages.
        """
        return False

    def column_panel_width(self, *, batch_invariant: bool = False) -> int | None:
        """Columns of panels in which float32 matrices are stored; None stores whole matrices."""
        return None

    def run_layers(
        self,
        layers: Sequence[PlacedLayer],
        carry: Carry,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[Carry, Pages]:
        """Runs layers one after another; the last one may return fewer tokens."""
        return run_in_turn(layers, carry, pages, context)

    def put_weight(
        self,
        weight_np: np.ndarray,
        dtype: jnp.dtype,
        *,
        is_transposed: bool,
        device: jax.Device | None = None,
    ) -> jax.Array:
        """Brings an array of a checkpoint to a device.

        Args:
            is_transposed: Whether the last two axes are swapped.
            device: None is JAX's default device.
        """
        # The host casts a small array in a few milliseconds. Compiling a program that casts it
        # would take 0.03 s per shape at every start.
        on_host = weight_np.size <= _MAX_HOST_CAST
        cast = cast_on_host if on_host else cast_on_device
        return cast(weight_np, dtype, is_transposed=is_transposed, device=device)

    def prepare_arrays(self, arrays: Iterable[jax.Array]) -> None:
        """Makes the memory of long-lived arrays faster to read; their values do not change."""

    def allocate_zeros(
        self, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding
    ) -> jax.Array:
        """A long-lived array of zeros."""
        return jnp.zeros(shape, dtype, device=sharding)

    def free_bytes_for_weights(self, devices: list[jax.Device]) -> int | None:
        """Free memory of the device that has least of it; None if a device does not report it."""
        found = [device.memory_stats() or {} for device in devices]
        if not all("bytes_limit" in stats for stats in found):
            return None
        return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found)

    def free_host_bytes(self) -> int | None:
        """Free memory of the host, which the KV cache shares with everything else on the host.

        None if the KV cache is in the memory of a device.
        """
        return None

    def total_memory_bytes(self, limit_bytes: int) -> int:
        """Memory of the device, of which JAX may take `limit_bytes`."""
        return limit_bytes

    def identity(self) -> dict[str, str]:
        """What compiled programs depend on in addition to the device, by name."""
        return {}

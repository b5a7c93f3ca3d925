"""Compiles every program that traffic can ask for before the engine is ready, and counts later."""

import concurrent.futures
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from tqdm import tqdm

from models import KVCache, LoadedModel
from paxkv.runner.bucketing import CopyShape, StepBuckets, StepShape
from paxkv.runner.packed_layout import PackedLayout
from paxkv.runner.step import Params, make_block_copies, make_step

# What XLA does after lowering runs beside other compilations, and beside the next lowering.
_MAX_COMPILE_THREADS = 8


class StepPrograms:
    """The compiled steps of a model and its block copies, one program per bucket.

    They are compiled ahead of time: such a program takes its own shapes, dtypes and shardings and
    raises for any other, so no call can compile behind our back and the count below is true.
    """

    def __init__(
        self,
        *,
        model: LoadedModel,
        params: Params,
        buckets: StepBuckets,
        max_num_seqs: int,
        mesh: Mesh,
    ) -> None:
        self._model = model
        self._params = params
        self._buckets = buckets
        self._max_num_seqs = max_num_seqs
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._programs: dict[StepShape | CopyShape, Compiled] = {}
        self._is_ready = False
        self.num_compiles_after_ready = 0

    def compile(self, shape: StepShape | CopyShape, kv_cache: KVCache) -> Compiled:
        """The program of `shape`, not kept; `kv_cache` may be abstract."""
        return self._lower(shape, kv_cache).compile()

    def _lower(self, shape: StepShape | CopyShape, kv_cache: KVCache) -> Lowered:
        if isinstance(shape, CopyShape):
            copies = self._abstract_int32(2, shape.num_copies)
            copy_blocks = make_block_copies(self._model)
            return jax.jit(copy_blocks, donate_argnums=0).lower(kv_cache, copies)
        step = jax.jit(make_step(self._model, shape), donate_argnums=1)
        packed = self._abstract_int32(PackedLayout(shape).num_words)
        prev_tokens = self._abstract_int32(self._max_num_seqs)
        return step.lower(self._params, kv_cache, packed, prev_tokens)

    def warm_up(self, kv_cache: KVCache, *, show_progress: bool) -> None:
        """Compiles every bucket, several at a time, the largest first."""
        shapes = (*self._buckets.shapes[::-1], *self._buckets.copy_shapes)
        missing = [shape for shape in shapes if shape not in self._programs]
        progress = tqdm(
            total=len(missing),
            desc="compiling programs",
            unit="shape",
            file=sys.stderr,
            disable=not show_progress,
        )
        num_threads = min(os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        with progress, concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            # Lowered one after the other: Mosaic numbers kernels in the order in which a process
            # lowers them (JAX 0.11), so that another order would be another program to a cache.
            compiling = {
                threads.submit(self._lower(shape, kv_cache).compile): shape for shape in missing
            }
            for done in concurrent.futures.as_completed(compiling):
                self._programs[compiling[done]] = done.result()
                progress.update()
        self._is_ready = True

    def get(self, shape: StepShape | CopyShape, kv_cache: KVCache) -> Compiled:
        """The program of `shape`; compiles it if the warm-up was left out or missed it."""
        if shape not in self._programs:
            self._programs[shape] = self.compile(shape, kv_cache)
            self.num_compiles_after_ready += self._is_ready
        return self._programs[shape]

    def _abstract_int32(self, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.int32, sharding=self._sharding)

"""`StepPrograms`: loads or compiles every program before the engine is ready."""

import concurrent.futures
import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from jax.typing import DTypeLike
from tqdm import tqdm

from models import LoadedModel, Pages
from models.loading.loaded_draft_model import LoadedDrafter
from models.platforms.resident_memory import return_freed_memory
from paxkv.runner.features.head_memory import head_memory_of
from paxkv.runner.features.target_hidden import target_hidden_of
from paxkv.runner.features.traced_features import split_arrays
from paxkv.runner.memory.device_mesh import logits_sharding
from paxkv.runner.programs.burst import make_burst
from paxkv.runner.programs.draft import make_draft
from paxkv.runner.programs.drafting_burst import make_drafting_burst
from paxkv.runner.programs.invariant_step import make_invariant_step
from paxkv.runner.programs.make_batch import write_slots
from paxkv.runner.programs.program_identity import program_identity
from paxkv.runner.programs.program_store import ProgramFolder, ProgramStore, without_jax_cache
from paxkv.runner.programs.step import Params, make_block_copies, make_step
from paxkv.runner.sampling.row_state import (
    RowState,
    abstract_row_state,
    num_row_words,
    vocab_words,
    write_row,
)
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH
from paxkv.runner.sampling.sampler_program import make_sampler
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import (
    BurstShape,
    CopyShape,
    DrafterShape,
    DraftShape,
    ProgramShape,
    RowShape,
    SamplerShape,
    SlotShape,
)
from paxkv.runner.shapes.sampling_row import step_row_width
from paxkv.runner.shapes.step_buckets import StepBuckets

logger = logging.getLogger(__name__)


class StepPrograms:
    """The compiled programs of a model, one per bucket.

    Programs are compiled ahead of time. Such a program raises an error for shapes, dtypes and
    shardings other than its own, so calls never compile, and the counters miss no compilation.

    Args:
        store: Loads and saves programs. None: all programs are compiled.
        head: The draft head, if the buckets have programs for one.

    Attributes:
        num_compiles_after_ready: Programs that the warm-up missed, compiled while serving.
    """

    def __init__(
        self,
        *,
        model: LoadedModel,
        params: Params,
        buckets: StepBuckets,
        max_num_seqs: int,
        mesh: Mesh,
        store: ProgramStore | None = None,
        head: LoadedDrafter | None = None,
    ) -> None:
        self._head = head
        self._model = model
        self._params = params
        self.buckets = buckets
        self._max_num_seqs = max_num_seqs
        self._mesh = mesh
        self._store = store
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._compiler_options = model.platform.compiler_options(
            model.product_dtypes, batch_invariant=buckets.is_batch_invariant
        )
        if jax.process_count() > 1:
            self._compiler_options |= model.platform.compiler_options_of_processes()
        self._programs: dict[ProgramShape, Compiled] = {}
        self._is_ready = False
        self.num_loaded = 0
        self.num_compiles = 0
        self.num_compiles_after_ready = 0

    def compile(self, shape: ProgramShape, kv_cache: Pages) -> Compiled:
        """Compiles the program of `shape` without storing it. `kv_cache` may be abstract."""
        return self._finish(shape, self._lower(shape, kv_cache))

    def measure_temp_bytes(self, kv_cache: Pages) -> int:
        """Returns the most memory that any program needs for temporary arrays and results.

        Args:
            kv_cache: May be abstract.

        Raises:
            ConfigError: See `warm_up`.
        """
        shapes = self.buckets.largest
        folder = self._open_store(shapes, kv_cache)
        programs = self._load_or_compile(shapes, kv_cache, folder, show_progress=False)
        found = [program.memory_analysis() for program in programs.values()]
        # A result that is written over a donated array needs no more memory.
        return max(
            m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found
        )

    def _lower(self, shape: ProgramShape, kv_cache: Pages) -> Lowered:
        if isinstance(shape, OwnProgram):
            return shape.lower(self._model, self._params, kv_cache, self._sharding)
        if isinstance(shape, CopyShape):
            copies = self._abstract(2, shape.num_copies)
            copy_blocks = make_block_copies(self._model)
            outputs = {"out_shardings": kv_cache.sharding}
            return jax.jit(copy_blocks, donate_argnums=0, **outputs).lower(kv_cache, copies)
        if isinstance(shape, (SamplerShape, RowShape)):
            return self._lower_sampling(shape)
        if isinstance(shape, SlotShape):
            write = jax.jit(write_slots, donate_argnums=0, out_shardings=self._sharding)
            return write.lower(self._abstract(*shape.dims), self._abstract(*shape.packed_dims))
        if isinstance(shape, DraftShape):
            return self._lower_draft(shape, kv_cache)
        packed = self._abstract(PackedLayout(shape).num_words)
        prev_tokens = self._abstract(self._max_num_seqs)
        arguments = (self._params, kv_cache, packed, prev_tokens)
        arrays = [
            {name: self._abstract(*a.dims, dtype=a.dtype) for name, a in variant.arrays().items()}
            for variant in shape.features
        ]
        kept, donated = split_arrays(shape.features, arrays)
        # Everything except the cache and the logits is whole on each device.
        logits = self._abstract_logits()
        if isinstance(shape, BurstShape):
            if shape.drafts is None:
                function = make_burst(self._model, shape)
            else:
                function = make_drafting_burst(self._model, shape, self._head)
            has_head = isinstance(shape.drafts, DrafterShape)
            head_params = (self._head.params,) if has_head else ()
            burst = jax.jit(
                function,
                donate_argnums=(1, 4, 5, 7),
                out_shardings=(kv_cache.sharding, logits.sharding, *[self._sharding] * 5),
            )
            row_state = self._abstract_row_state()
            last = (kept, donated, self._abstract_slot_blocks(), *head_params)
            return burst.lower(*arguments, logits, row_state, *last)
        make = make_step if shape.tile_tokens is None else make_invariant_step
        step = jax.jit(
            make(self._model, shape),
            donate_argnums=(1, 4, 6),
            out_shardings=(kv_cache.sharding, logits.sharding, *[self._sharding] * 3),
        )
        return step.lower(*arguments, logits, kept, donated, self._abstract_slot_blocks())

    def _lower_draft(self, shape: DraftShape, kv_cache: Pages) -> Lowered:
        sampler_shape = self.buckets.sampler_shape
        packed = self._abstract(PackedLayout(shape.step).num_words)
        arrays = {
            name: self._abstract(*array.dims, dtype=array.dtype)
            for variant in shape.step.features
            if variant.is_for_draft_head
            for name, array in variant.arrays().items()
        }
        result = (sampler_shape.max_draws, sampler_shape.num_reqs, RESULT_WIDTH)
        draft = jax.jit(
            make_draft(self._model, self._head, shape),
            donate_argnums=(2, 9),
            out_shardings=(kv_cache.sharding, self._sharding, self._sharding),
        )
        return draft.lower(
            self._params,
            self._head.params,
            kv_cache,
            packed,
            self._abstract(self._max_num_seqs),
            target_hidden_of(arrays),
            self._abstract(*result),
            self._abstract(shape.step.num_reqs),
            self._abstract(),
            head_memory_of(arrays),
            self._abstract_slot_blocks(),
        )

    def _lower_sampling(self, shape: SamplerShape | RowShape) -> Lowered:
        vocab_size = self._model.config.vocab_size
        state = self._abstract_row_state()
        if isinstance(shape, RowShape):
            packed = self._abstract(num_row_words(shape.max_model_len, vocab_size))
            write = jax.jit(write_row, donate_argnums=0, out_shardings=self._sharding)
            return write.lower(state, packed)
        sampling = self._abstract(shape.num_rows, step_row_width(shape.max_draws))
        token_mask = self._abstract(shape.num_rows, 1 + vocab_words(vocab_size))
        logits = self._abstract_logits()
        sampler = jax.jit(
            make_sampler(shape, self._model.kernels.mesh),
            donate_argnums=(0, 1),
            out_shardings=(logits.sharding, *[self._sharding] * 3),
        )
        return sampler.lower(logits, state, sampling, token_mask)

    def _finish(self, shape: ProgramShape, lowered: Lowered) -> Compiled:
        self.num_compiles += 1
        return lowered.compile(self._compiler_options)

    def warm_up(self, kv_cache: Pages, *, show_progress: bool) -> int:
        """Loads or compiles the programs of all buckets, several at a time, the largest first.

        Returns:
            The number of programs.

        Raises:
            ConfigError: The store cannot be used, or its programs do not fit.
        """
        start = time.monotonic()
        shapes = [shape for shape in self.buckets.largest_first if shape not in self._programs]
        folder = self._open_store(shapes, kv_cache)
        num_compiled_before = self.num_compiles
        self._programs |= self._load_or_compile(
            shapes, kv_cache, folder, show_progress=show_progress
        )
        self._is_ready = True
        where = "" if folder is None else f" from {folder.path}"
        num_compiled = self.num_compiles - num_compiled_before
        logger.info(
            "programs: %d loaded%s, %d compiled, in %.1f s",
            *(len(shapes) - num_compiled, where, num_compiled, time.monotonic() - start),
        )
        return len(self._programs)

    def describe(self, kv_cache: Pages) -> str:
        """Describes all programs, one fact on a line. Equal texts mean equal programs."""
        facts = [f"{name}: {value}" for name, value in sorted(self._identity(kv_cache).items())]
        return "\n".join([*facts, *map(repr, self.buckets.largest_first)])

    def _open_store(self, shapes: Sequence[ProgramShape], kv_cache: Pages) -> ProgramFolder | None:
        if self._store is None:
            return None
        identity = self._identity(kv_cache)
        if jax.process_count() > 1:
            # A stored program names the devices of its process.
            identity["process"] = f"{jax.process_index()} of {jax.process_count()}"
        return self._store.open(identity, shapes, list(self._mesh.devices.flat))

    def _identity(self, kv_cache: Pages) -> dict[str, str]:
        return program_identity(
            model=self._model,
            params=self._params,
            kv_cache=kv_cache,
            mesh=self._mesh,
            max_num_seqs=self._max_num_seqs,
            num_logits_rows=self.buckets.sampler_shape.num_rows,
            compiler_options=self._compiler_options,
            head=self._head,
            feature_code=(*self.buckets.feature_variants, *self.buckets.own_programs),
        )

    def _load_or_compile(
        self,
        shapes: Sequence[ProgramShape],
        kv_cache: Pages,
        folder: ProgramFolder | None,
        *,
        show_progress: bool,
    ) -> dict[ProgramShape, Compiled]:
        """Loads the programs that the folder has and compiles the others, several at a time."""
        num_threads = self._model.platform.num_compile_threads()
        # The cache is turned on again after the threads have ended, even if one of them failed.
        jax_cache = contextlib.nullcontext() if folder is None else without_jax_cache()
        programs: dict[ProgramShape, Compiled] = {}
        with jax_cache, concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            try:
                if folder is not None:
                    found = zip(shapes, threads.map(folder.load, shapes), strict=True)
                    programs = {shape: program for shape, program in found if program is not None}
                    self.num_loaded += len(programs)
                missing = [shape for shape in shapes if shape not in programs]
                programs |= self._compile_all(
                    *(missing, kv_cache, folder, threads, num_threads), show_progress=show_progress
                )
            except BaseException:
                # After an interrupt or an error, the threads start no more programs.
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return programs

    def _compile_all(
        self,
        shapes: Sequence[ProgramShape],
        kv_cache: Pages,
        folder: ProgramFolder | None,
        threads: concurrent.futures.Executor,
        num_threads: int,
        *,
        show_progress: bool,
    ) -> dict[ProgramShape, Compiled]:
        def finish(shape: ProgramShape, lowered: Lowered) -> Compiled:
            program = self._finish(shape, lowered)
            if folder is not None:
                folder.save(shape, program)
            return program

        programs: dict[ProgramShape, Compiled] = {}
        progress = tqdm(
            total=len(shapes),
            desc="compiling programs",
            unit="shape",
            file=sys.stderr,
            disable=not show_progress or not shapes,
        )
        with progress:
            # Programs are lowered one after the other, always in the same order. Mosaic numbers
            # kernels in the order in which a process lowers them (JAX 0.11), and the numbers decide
            # whether a cache has a program.
            compiling: dict[concurrent.futures.Future[Compiled], ProgramShape] = {}
            for shape in shapes:
                # Lowered programs need memory, so one is lowered when a thread can compile it.
                _wait_until_fewer(compiling, num_threads)
                # The C library would keep the memory that the programs before this one have freed.
                return_freed_memory()
                future = threads.submit(finish, shape, self._lower(shape, kv_cache))
                future.add_done_callback(lambda _: progress.update())
                compiling[future] = shape
            for done in concurrent.futures.as_completed(compiling):
                programs[compiling[done]] = done.result()
        return programs

    def get(self, shape: ProgramShape, kv_cache: Pages) -> Compiled:
        """Returns the program of `shape`. Compiles it if no warm-up has done so."""
        if shape not in self._programs:
            self._programs[shape] = self.compile(shape, kv_cache)
            self.num_compiles_after_ready += self._is_ready
        return self._programs[shape]

    def _abstract_logits(self) -> jax.ShapeDtypeStruct:
        num_rows, vocab_size = self.buckets.sampler_shape.num_rows, self._model.config.vocab_size
        sharding = logits_sharding(self._mesh, vocab_size)
        return jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32, sharding=sharding)

    def _abstract_slot_blocks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._abstract(*slots.dims) for slots in self.buckets.slot_shapes)

    def _abstract_row_state(self) -> RowState:
        vocab_size = self._model.config.vocab_size
        return abstract_row_state(self.buckets.row_shape, vocab_size, self._sharding)

    def _abstract(self, *dims: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self._sharding)


def _wait_until_fewer(
    compiling: Iterable[concurrent.futures.Future[Compiled]], num_threads: int
) -> None:
    """Waits until fewer than `num_threads` programs are compiling. Raises their errors at once."""
    running = set(compiling)
    while True:
        done = {future for future in running if future.done()}
        for future in done:
            future.result()
        running -= done
        if len(running) < num_threads:
            return
        concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)

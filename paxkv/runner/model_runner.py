"""`ModelRunner`: computes the scheduler's steps on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import KernelSettings, LoadedModel, kv_cache_layers
from paxkv.config import CacheConfig, RunnerConfig, SchedulerConfig
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import AttentionSpec, KVCacheConfig
from paxkv.contracts.runner_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ModelRunnerOutput,
    TokenLogprobs,
)
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch_builder import BatchBuilder, BuiltStep
from paxkv.runner.block_copies import build_block_copies
from paxkv.runner.bucketing import CopyShape, StepBuckets
from paxkv.runner.input_batch import InputBatch
from paxkv.runner.kernel_check import choose_implementation
from paxkv.runner.kv_cache_arrays import (
    abstract_kv_cache,
    allocate_kv_cache,
    default_block_size,
    device_mesh,
    kv_cache_dtype,
    page_spec,
)
from paxkv.runner.kv_cache_groups import KVCacheGroups, groups_of_layers
from paxkv.runner.memory_plan import (
    DeviceMemory,
    MemoryPlan,
    measure_device_memory,
    plan_memory,
)
from paxkv.runner.profiler import Profiler
from paxkv.runner.program_store import ProgramStore
from paxkv.runner.sampled_tokens import NO_TOKEN, read_logprobs
from paxkv.runner.unbuilt import refuse_unbuilt
from paxkv.runner.warmup import StepPrograms

DEFAULT_RUNNER_CONFIG = RunnerConfig()


class ModelRunner:
    """The `Executor` of one device: owns the KV cache arrays and the rows of running requests.

    Args:
        max_model_len: Most tokens of a request, prompt and output together.
        seed: Of the draws of requests that bring no seed of their own.
        program_store: Where compiled programs are found and kept; None compiles all of them.
        show_progress: Draws a bar on stderr while the warm-up compiles.

    Raises:
        ConfigError: The KV cache does not fit, is too small for one request, or the layers cannot
            share one.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        max_model_len: int,
        seed: int,
        runner_config: RunnerConfig = DEFAULT_RUNNER_CONFIG,
        program_store: ProgramStore | None = None,
        show_progress: bool = False,
    ) -> None:
        max_num_seqs = scheduler_config.max_num_seqs
        device = next(iter(model.params[0].devices()))
        mesh = device_mesh(device)
        groups = groups_of_layers(
            kv_cache_layers(model.config),
            block_size=cache_config.block_size or default_block_size(device.platform),
            dtype=kv_cache_dtype(model.params[0].dtype.name, device.platform),
        )
        # All groups must have one, or the arrays cannot be made.
        spec = page_spec(groups.kv_cache_groups)
        block_size = spec.block_size
        model = model.with_kernels(_kernel_settings(runner_config, model, spec, mesh))
        num_groups = len(groups.kv_cache_groups)
        max_blocks_per_req = max(
            group.kv_cache_spec.max_blocks_per_req(max_model_len)
            for group in groups.kv_cache_groups
        )
        buckets = StepBuckets(
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_decode_burst=scheduler_config.max_decode_burst,
            num_groups=num_groups,
            max_blocks_per_req=max_blocks_per_req,
            batch_invariant=runner_config.batch_invariant,
        )
        self._params = tuple(
            jax.device_put(param, NamedSharding(mesh, spec))
            for param, spec in zip(model.params, model.param_specs, strict=True)
        )
        self._show_progress = show_progress
        self._profiler = Profiler()
        self._programs = StepPrograms(
            model=model,
            params=self._params,
            buckets=buckets,
            max_num_seqs=max_num_seqs,
            mesh=mesh,
            store=program_store,
        )
        self.memory_plan: MemoryPlan = plan_memory(
            groups,
            cache_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            device_memory=self._measure_memory(mesh, cache_config, groups),
        )
        self._kv_cache = allocate_kv_cache(self.kv_cache_config, mesh)
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._prev_tokens = jnp.zeros(max_num_seqs, jnp.int32, device=self._sharding)
        self._rows = InputBatch.create(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_blocks_per_req=max_blocks_per_req,
            num_groups=num_groups,
            num_blocks=self.kv_cache_config.num_blocks,
            vocab_size=model.config.vocab_size,
            seed=seed,
        )
        self._builder = BatchBuilder(
            buckets=buckets,
            input_batch=self._rows,
            max_num_seqs=max_num_seqs,
            block_sizes=(block_size,) * num_groups,
        )
        self._buckets = buckets
        self._num_padded_tokens = 0

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self.memory_plan.kv_cache_config

    @property
    def num_padded_tokens(self) -> int:
        return self._num_padded_tokens

    @property
    def num_compiles_after_ready(self) -> int:
        return self._programs.num_compiles_after_ready

    def warm_up(self) -> int:
        """Loads or compiles every program that traffic can ask for; returns their number."""
        return self._programs.warm_up(self._kv_cache, show_progress=self._show_progress)

    def start_profile(self, folder: str) -> bool:
        return self._profiler.start(folder)

    def stop_profile(self) -> bool:
        return self._profiler.stop()

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Starts one step and returns without waiting for it.

        The next step may start before this one's tokens are fetched: a request's token that only
        the device knows is taken from there.

        Raises:
            InvariantError: The decision does not fit what the runner knows of the requests.
        """
        refuse_unbuilt(scheduler_output)
        self._rows.update(scheduler_output)
        # Before the step's writes, and in the order of the device: blocks may change hands here.
        self._copy_blocks(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return FinishedStep()
        built = self._builder.build(scheduler_output)
        packed = jax.device_put(built.packed_np, self._sharding)
        program = self._programs.get(built.shape, self._kv_cache)
        self._kv_cache, result, self._prev_tokens = program(
            self._params, self._kv_cache, packed, self._prev_tokens
        )
        self._rows.note_drawn(built.rows_np, built.num_drawn_np)
        self._num_padded_tokens += built.num_padded_tokens
        return DeviceStep(result=result, built=built, rows=self._rows)

    def _copy_blocks(self, scheduler_output: SchedulerOutput) -> None:
        num_blocks = self.kv_cache_config.num_blocks
        for copies_np in build_block_copies(scheduler_output, self._buckets, num_blocks=num_blocks):
            program = self._programs.get(CopyShape(num_copies=copies_np.shape[1]), self._kv_cache)
            copies = jax.device_put(copies_np, self._sharding)
            self._kv_cache = program(self._kv_cache, copies)

    def _measure_memory(
        self,
        mesh: Mesh,
        cache_config: CacheConfig,
        groups: KVCacheGroups,
    ) -> DeviceMemory | None:
        """Memory of the device and of the largest programs; None where it decides nothing."""
        device = mesh.devices.item()
        if device.platform == "cpu" or cache_config.num_gpu_blocks_override is not None:
            return None
        # Temporary memory does not depend on the cache's size, so a tiny one will do.
        tiny_cache = abstract_kv_cache(groups.config(num_blocks=2), mesh)
        activation_bytes = self._programs.measure_temp_bytes(tiny_cache)
        return measure_device_memory(device, self._params, activation_bytes)


def _kernel_settings(
    config: RunnerConfig, model: LoadedModel, spec: AttentionSpec, mesh: Mesh
) -> KernelSettings:
    # Batch-invariant sums are plain XLA on every device.
    kernels = "xla" if config.batch_invariant else config.kernels
    return KernelSettings.for_mesh(
        mesh,
        implementation=choose_implementation(kernels, model.config, spec, mesh.devices.flat[0]),
        batch_invariant=config.batch_invariant,
    )


class FinishedStep:
    """A step that had nothing to compute."""

    def sample_tokens(self) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


class DeviceStep:
    """A step that the device is computing, or has computed."""

    def __init__(
        self,
        *,
        result: jax.Array,  # i32[max_steps, num_reqs, RESULT_WIDTH]
        built: BuiltStep,
        rows: InputBatch,
    ) -> None:
        self._result: jax.Array | None = result
        self._built = built
        self._rows = rows
        # Now, because a request may be gone when the tokens come home, and its id another's; or it
        # may have lost its row, and got one again.
        self._states = [rows.requests[req_id] for req_id in built.req_ids]
        self._num_starts = [state.num_starts for state in self._states]

    def sample_tokens(self) -> ModelRunnerOutput:
        """Waits for the device, brings the tokens home and writes them into the rows.

        Raises:
            InvariantError: They were fetched before.
        """
        if self._result is None:
            raise InvariantError("the tokens of a step are fetched once.")
        result_np = jax.device_get(self._result)
        self._result = None
        req_ids, num_drawn_np = self._built.req_ids, self._built.num_drawn_np
        drawn_np = result_np[: num_drawn_np.max(), : len(req_ids), 0]
        # A row that draws fewer than others has drawn nothing in the last steps.
        step_idx_np = np.arange(len(drawn_np), dtype=np.int32)[:, None]
        drawn_np = np.where(step_idx_np < num_drawn_np, drawn_np, NO_TOKEN)
        self._write_into_rows(drawn_np)
        sampled_token_ids = [
            [token_id for token_id in row if token_id != NO_TOKEN] for row in drawn_np.T.tolist()
        ]
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=sampled_token_ids,
            logprobs=[
                self._read_logprobs(result_np, req_idx, len(token_ids))
                for req_idx, token_ids in enumerate(sampled_token_ids)
            ],
        )

    def _read_logprobs(
        self, result_np: np.ndarray, req_idx: int, num_tokens: int
    ) -> list[TokenLogprobs] | None:
        num_logprobs = self._states[req_idx].sampling_params.logprobs
        if num_logprobs is None:
            return None
        return [
            read_logprobs(result_row_np, num_logprobs)
            for result_row_np in result_np[:num_tokens, req_idx]
        ]

    def _write_into_rows(self, drawn_np: np.ndarray) -> None:
        """Args: drawn_np: i32[num_steps, num_reqs]."""
        kept = [
            req_idx
            for req_idx, (state, num_starts) in enumerate(
                zip(self._states, self._num_starts, strict=True)
            )
            if self._rows.requests.get(state.req_id) is state
            and state.num_starts == num_starts
            # A preempted request gets all its tokens from the scheduler when it resumes.
            and state.row_idx is not None
        ]
        self._rows.append_tokens(
            self._built.rows_np[kept], drawn_np[:, kept], self._built.num_drawn_np[kept]
        )

"""`ModelRunner`: computes the scheduler's steps on one device."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import KernelSettings, LoadedModel, kv_cache_layers
from paxkv.config import CacheConfig, RunnerConfig, SchedulerConfig
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import KVCacheConfig
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
from paxkv.runner.sampled_tokens import read_logprobs
from paxkv.runner.unbuilt import refuse_unbuilt
from paxkv.runner.warmup import StepPrograms

DEFAULT_RUNNER_CONFIG = RunnerConfig()


class ModelRunner:
    """The `Executor` of one device: owns the KV cache arrays and the rows of running requests.

    Args:
        max_model_len: Most tokens of a request, prompt and output together.
        seed: Of the draws of requests that bring no seed of their own.
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
        show_progress: bool = False,
    ) -> None:
        max_num_seqs = scheduler_config.max_num_seqs
        device = next(iter(model.params[0].devices()))
        mesh = device_mesh(device)
        groups = groups_of_layers(
            kv_cache_layers(model.config),
            block_size=cache_config.block_size,
            dtype=kv_cache_dtype(model.params[0].dtype.name, device.platform),
        )
        # All groups must have one, or the arrays cannot be made.
        spec = page_spec(groups.kv_cache_groups)
        block_size = spec.block_size
        implementation = choose_implementation(runner_config.kernels, model.config, spec, device)
        model = model.with_kernels(KernelSettings.for_mesh(mesh, implementation=implementation))
        num_groups = len(groups.kv_cache_groups)
        max_blocks_per_req = max(
            group.kv_cache_spec.max_blocks_per_req(max_model_len)
            for group in groups.kv_cache_groups
        )
        buckets = StepBuckets(
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            num_groups=num_groups,
            max_blocks_per_req=max_blocks_per_req,
        )
        self._params = tuple(
            jax.device_put(param, NamedSharding(mesh, spec))
            for param, spec in zip(model.params, model.param_specs, strict=True)
        )
        self._show_progress = show_progress
        self._programs = StepPrograms(
            model=model,
            params=self._params,
            buckets=buckets,
            max_num_seqs=max_num_seqs,
            mesh=mesh,
        )
        self.memory_plan: MemoryPlan = plan_memory(
            groups,
            cache_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            device_memory=self._measure_memory(mesh, cache_config, buckets, groups),
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

    def warm_up(self) -> None:
        """Compiles every program that traffic can ask for."""
        self._programs.warm_up(self._kv_cache, show_progress=self._show_progress)

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
        self._rows.note_sampled(built.rows_np, built.is_sampled_np)
        self._num_padded_tokens += (
            built.shape.num_tokens - scheduler_output.total_num_scheduled_tokens
        )
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
        buckets: StepBuckets,
        groups: KVCacheGroups,
    ) -> DeviceMemory | None:
        """Memory of the device and of the largest program; None where it decides nothing."""
        device = mesh.devices.item()
        if device.platform == "cpu" or cache_config.num_gpu_blocks_override is not None:
            return None
        # Temporary memory does not depend on the cache's size, so a tiny one will do.
        tiny_cache = abstract_kv_cache(groups.config(num_blocks=2), mesh)
        activation_bytes = max(
            self._programs.compile(shape, tiny_cache).memory_analysis().temp_size_in_bytes
            for shape in (buckets.largest, buckets.copy_shapes[-1])
        )
        return measure_device_memory(device, self._params, activation_bytes)


class FinishedStep:
    """A step that had nothing to compute."""

    def sample_tokens(self) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


class DeviceStep:
    """A step that the device is computing, or has computed."""

    def __init__(
        self,
        *,
        result: jax.Array,  # i32[num_logits, RESULT_WIDTH]
        built: BuiltStep,
        rows: InputBatch,
    ) -> None:
        self._result: jax.Array | None = result
        self._built = built
        self._rows = rows
        # Now, because a request may be gone when the tokens come home, and its id another's.
        self._states = [rows.requests[req_id] for req_id in built.req_ids]

    def sample_tokens(self) -> ModelRunnerOutput:
        """Waits for the device, brings the tokens home and writes them into the rows.

        Raises:
            InvariantError: They were fetched before.
        """
        if self._result is None:
            raise InvariantError("the tokens of a step are fetched once.")
        result_np = jax.device_get(self._result)
        self._result = None
        req_ids, is_sampled = self._built.req_ids, self._built.is_sampled_np.tolist()
        sampled_token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        for req_idx, token_id in enumerate(result_np[: len(req_ids), 0].tolist()):
            sampled_token_ids.append([token_id] if is_sampled[req_idx] else [])
            num_logprobs = self._states[req_idx].sampling_params.logprobs
            if num_logprobs is None:
                logprobs.append(None)
            elif is_sampled[req_idx]:
                logprobs.append([read_logprobs(result_np[req_idx], num_logprobs)])
            else:
                logprobs.append([])
        self._write_into_rows(sampled_token_ids)
        return ModelRunnerOutput(
            req_ids=req_ids, sampled_token_ids=sampled_token_ids, logprobs=logprobs
        )

    def _write_into_rows(self, sampled_token_ids: list[list[int]]) -> None:
        alive = [
            (state.req_id, token_id)
            for state, token_ids in zip(self._states, sampled_token_ids, strict=True)
            for token_id in token_ids
            if self._rows.requests.get(state.req_id) is state
        ]
        self._rows.append_tokens([req_id for req_id, _ in alive], [token for _, token in alive])

"""`ModelRunner`: computes the scheduler's steps on one device, or on the devices of a mesh."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import KernelSettings, LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from models.loading.loaded_module import LoadedModule
from models.platforms.resident_memory import resident_bytes, return_freed_memory
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.executor import StepHandle
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.batch_builder import BatchBuilder
from paxkv.runner.batch.block_copies import build_block_copies
from paxkv.runner.batch.built_step import BuiltStep
from paxkv.runner.batch.device_step import DeviceStep, FinishedStep
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.batch.unbuilt import refuse_unbuilt
from paxkv.runner.features.feature_list import make_features, make_head_drafts
from paxkv.runner.features.head_drafts import HeadDrafts, HeadStep
from paxkv.runner.memory.device_mesh import mesh_of
from paxkv.runner.memory.kv_cache_arrays import (
    abstract_kv_cache,
    allocate_kv_cache,
)
from paxkv.runner.memory.memory_plan import (
    DeviceMemory,
    HostMemory,
    measure_device_memory,
    report_memory,
)
from paxkv.runner.profiler import Profiler
from paxkv.runner.programs.expert_check import products_of
from paxkv.runner.programs.kernel_check import KernelChoice, choose_implementation
from paxkv.runner.programs.program_store import ProgramStore
from paxkv.runner.programs.scaled_check import scaled_products_of
from paxkv.runner.programs.step_sampler import StepSampler
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.ranks.rank_group import Leader, RankGroup, agree
from paxkv.runner.runner_plan import RunnerPlan, fit_all_ranks
from paxkv.runner.sampling.logits_check import LogitsCheck
from paxkv.runner.sampling.wide_logprobs import num_returned_logits
from paxkv.runner.shapes.program_shapes import BurstShape, TableShape
from paxkv.runner.worker import Worker

DEFAULT_RUNNER_CONFIG = RunnerConfig()

logger = logging.getLogger(__name__)


class ModelRunner:
    """The `Executor` of one engine: owns the KV cache arrays and the rows of running requests.

    It computes on the devices that have the model's weights. Results and the rows of requests are
    whole on each device.

    Args:
        max_model_len: Largest number of tokens of a request, prompt and output together.
        may_be_shorter: Whether `max_model_len` may be reduced to the largest value for which the
            KV cache has room. `memory_plan.max_model_len` is the result.
        host_memory: On a CPU, the memory to plan with. None: it is measured.
        seed: Seed of requests without a seed of their own.
        program_store: Loads and saves compiled programs. None: all programs are compiled.
        show_progress: Whether the warm-up draws a progress bar on stderr.
        head: The draft head of `runner_config.speculative_config`, if its method has one.
        group: The processes that compute for the engine. None: only this one.
        num_context_ranks: Devices that share the positions of a request.

    Attributes:
        kernel_choice: Whether kernels for this device run; if not, the reason.

    Raises:
        KVCacheTooSmallError: The KV cache has no room for one request (`RunnerPlan.fit`).
        ConfigError: The KV cache does not fit, or the layers cannot share one.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        max_model_len: int,
        may_be_shorter: bool = False,
        seed: int,
        runner_config: RunnerConfig = DEFAULT_RUNNER_CONFIG,
        host_memory: HostMemory | None = None,
        program_store: ProgramStore | None = None,
        show_progress: bool = False,
        head: LoadedDrafter | None = None,
        group: RankGroup | None = None,
        num_context_ranks: int = 1,
    ) -> None:
        features = make_features(runner_config, model)
        self._head_drafts: HeadDrafts | None = None
        if head is not None:
            self._head_drafts = make_head_drafts(
                *(runner_config, model, head),
                max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
                max_num_seqs=scheduler_config.max_num_seqs,
            )
            features = (*features, self._head_drafts)
        self._features = features
        self._handled = frozenset().union(*(feature.handles for feature in features))
        mesh = mesh_of(model.params[0])
        plan = RunnerPlan(
            model_config=model.config,
            dtype=model.dtype,
            platform=model.platform,
            cache_config=cache_config,
            scheduler_config=scheduler_config,
            runner_config=runner_config,
            max_model_len=max_model_len,
            may_be_shorter=may_be_shorter,
            feature_variants=tuple(feature.variants() for feature in features),
            own_programs=tuple(program for feature in features for program in feature.programs()),
            max_drafts=max((feature.max_drafts for feature in features), default=0),
            num_devices=mesh.size,
            num_context_ranks=num_context_ranks,
            head_config=None if head is None else head.config,
        )
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._platform = model.platform
        model = model.with_places(plan.places)
        modules: list[LoadedModule] = [model]
        if head is not None:
            head = head.with_places(plan.head_places)
            modules.append(head)
        kernels = KernelSettings.for_mesh(
            mesh,
            batch_invariant=runner_config.batch_invariant,
            num_context_ranks=num_context_ranks,
        )
        self.kernel_choice = _choose_kernels(runner_config, modules, plan.tables, kernels, group)
        kernels = dataclasses.replace(kernels, implementation=self.kernel_choice.implementation)
        model = model.with_kernels(kernels)
        params = _put_params(model, mesh)
        head_params: tuple[jax.Array, ...] = ()
        if head is not None:
            # Drafts may differ from batch to batch, and answers do not depend on them.
            head = head.with_kernels(dataclasses.replace(kernels, batch_invariant=False))
            head_params = _put_params(head, mesh)
        modules = [model] if head is None else [model, head]
        self._weight_bytes = sum(module.device_bytes for module in modules)

        def make_programs(plan: RunnerPlan) -> StepPrograms:
            return StepPrograms(
                model=model,
                params=params,
                buckets=plan.buckets,
                max_num_seqs=scheduler_config.max_num_seqs,
                mesh=mesh,
                store=program_store,
                head=head,
            )

        memory = host_memory or self._measure_memory(plan, make_programs)
        plan, self.memory_plan = fit_all_ranks(plan, memory, group)
        self._group = group
        self._buckets = plan.buckets
        self.worker = Worker(
            make_programs(plan),
            params=params,
            head_params=head_params,
            kv_cache=allocate_kv_cache(self.kv_cache_config, mesh, self._platform, plan.kv_dtype),
            features=features,
            head_drafts=self._head_drafts,
            vocab_size=model.config.vocab_size,
            max_num_seqs=scheduler_config.max_num_seqs,
            sharding=self._sharding,
            send=group.send if isinstance(group, Leader) else None,
        )
        self._rows = InputBatch.create(
            max_num_seqs=scheduler_config.max_num_seqs,
            max_model_len=plan.max_model_len,
            tables=plan.tables,
            num_blocks=self.kv_cache_config.num_blocks,
            vocab_size=model.config.vocab_size,
            seed=seed,
            keeps_tokens=bool(plan.buckets.drafting_burst_shapes),
        )
        self._builder = BatchBuilder(
            buckets=plan.buckets,
            input_batch=self._rows,
            max_num_seqs=scheduler_config.max_num_seqs,
            features=features,
        )
        self._show_progress = show_progress
        self._profiler = Profiler()
        self._returns_logits = num_returned_logits(runner_config, model.config.vocab_size) > 0
        self._logits_check = LogitsCheck() if runner_config.check_logits else None
        self._num_padded_tokens = 0
        self._waiting_step: DeviceStep | None = None  # waits for the bitmask of its grammars

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self.memory_plan.kv_cache_config

    @property
    def max_drafts(self) -> int:
        """Most drafts of one request that a step verifies."""
        return self._buckets.max_draws - 1

    @property
    def num_padded_tokens(self) -> int:
        return self._num_padded_tokens

    @property
    def num_corrupted_requests(self) -> int:
        return 0 if self._logits_check is None else self._logits_check.num_corrupted_requests

    def feature_stats(self, *, only_new: bool) -> dict[str, object]:
        """See `Executor.feature_stats`."""
        found: dict[str, object] = {}
        for feature in self._features:
            found |= feature.stats(only_new=only_new)
        return found

    @property
    def num_compiles_after_ready(self) -> int:
        return self.worker.programs.num_compiles_after_ready

    def warm_up(self) -> int:
        """Loads or compiles every program that traffic can ask for; returns their number.

        Raises:
            ConfigError: Processes of a group have different programs.
        """
        programs, kv_cache = self.worker.programs, self.worker.kv_cache
        agree(self._group, "programs", lambda: programs.describe(kv_cache))
        # On a CPU, the system copies weights into huge pages while programs are compiled.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            params = (*self.worker.params, *self.worker.head_params)
            prepared = thread.submit(self._platform.prepare_arrays, params)
            num_programs = programs.warm_up(kv_cache, show_progress=self._show_progress)
            prepared.result()
        # No rank begins before all are ready.
        agree(self._group, "number of programs", lambda: str(num_programs))
        return_freed_memory()
        on_host = self._platform.free_host_bytes() is not None
        if on_host and (resident := resident_bytes()) is not None:
            num_devices = len(self._sharding.mesh.local_devices)
            sizes = (self._weight_bytes * num_devices, self.memory_plan.pool_bytes * num_devices)
            logger.info("%s", report_memory(resident, *sizes))
        return num_programs

    def close(self) -> None:
        """See `Executor.close`."""
        if self._group is not None:
            self._group.end()

    def follow(self) -> None:
        """Repeats the leader's calls until the leader ends.

        Raises:
            EngineDeadError: A call is damaged or lost.
        """
        while (call := self._group.next_call()) is not None:
            self.worker.repeat(call)

    def start_profile(self, folder: str) -> bool:
        return self._profiler.start(folder)

    def stop_profile(self) -> bool:
        return self._profiler.stop()

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Starts one step and returns without waiting for it.

        The next step may start before the tokens of this one are fetched. Its program then reads
        them from an array on the device.

        Raises:
            InvariantError: `scheduler_output` contradicts the runner's rows, or the step before
                this one still waits for the bitmask of its grammars.
        """
        refuse_unbuilt(scheduler_output, self._handled, max_drafts=self.max_drafts)
        if self._waiting_step is not None:
            raise InvariantError(
                "the step before this one waits for its grammar bitmask: call its "
                "`start_sampling` first."
            )
        self._rows.update(scheduler_output)
        with self.worker.feature_device() as device:
            for feature in self._features:
                feature.before_step(scheduler_output, device)
        for packed_np in self._rows.pack_started_rows():
            self.worker.write_row(packed_np)
        for table_idx, table in enumerate(self._rows.block_tables.slot_tables):
            for packed_np in table.pack_new_slots():
                self.worker.write_slots(table_idx, packed_np)
        # The device copies blocks before the step runs, because the step may overwrite them.
        num_blocks = self.kv_cache_config.num_blocks
        copies_np = build_block_copies(scheduler_output, self._buckets, num_blocks=num_blocks)
        if copies_np is not None:
            self.worker.copy_blocks(copies_np)
        if not scheduler_output.num_scheduled_tokens:
            return FinishedStep(self._features)
        if self._logits_check is not None:
            self._logits_check.request_logprobs(self._rows.sampling_rows_np)
        built = self._builder.build(scheduler_output)
        step = DeviceStep(built=built, rows=self._rows, logits_check=self._logits_check)
        self._launch(built, step)
        with self.worker.feature_device() as device:
            for feature in self._features:
                feature.after_step(device)
        self._rows.record_drawn(built.rows_np, built.num_drawn_np, built.num_drafts_np)
        self._num_padded_tokens += built.num_padded_tokens
        return step

    def _launch(self, built: BuiltStep, step: DeviceStep) -> None:
        worker, shape = self.worker, built.shape
        if isinstance(shape, BurstShape):
            leaves_logits = built.leaves_logits
            result = worker.run_burst(shape, built.packed_np, leaves_logits=leaves_logits)
            if not leaves_logits:
                step.result = result
                return
        else:
            results = worker.run_step(shape, built.packed_np)
            step.feature_results = dict(zip(shape.features, results, strict=True))

        def draw(mask_np: np.ndarray | None) -> jax.Array:
            self._waiting_step = None
            result = worker.draw(mask_np)
            num_proposed = sum(
                planned.num_proposed for planned in built.features if isinstance(planned, HeadStep)
            )
            if num_proposed:
                step.drafts = worker.draft(built.following_ids_np, num_proposed=num_proposed)
            if self._returns_logits:
                step.fetch_logits(worker.sampler.logits)
            return result

        if step.grammar_rows:
            self._waiting_step = step
            step.wait_for_bitmask(draw, worker.sampler.mask_dims)
        else:
            step.result = draw(None)

    def _measure_memory(
        self, plan: RunnerPlan, make_programs: Callable[[RunnerPlan], StepPrograms]
    ) -> DeviceMemory | HostMemory | None:
        """Measures the memory of the host, or compiles the largest programs to measure a device.

        None if `num_gpu_blocks_override` gives the number of blocks.
        """
        if plan.cache_config.num_gpu_blocks_override is not None:
            return None
        free_host_bytes = self._platform.free_host_bytes()
        if free_host_bytes is not None:
            return HostMemory(free_bytes=free_host_bytes)
        mesh = self._sharding.mesh
        # Temporary memory does not depend on the size of the cache.
        tiny_cache = abstract_kv_cache(
            plan.groups.config(num_blocks=2), mesh, self._platform, plan.kv_dtype
        )
        own_bytes = StepSampler.num_bytes(plan.buckets, plan.model_config.vocab_size)
        own_bytes += sum(shape.num_bytes for shape in plan.buckets.slot_shapes)
        return measure_device_memory(
            mesh.local_devices,
            self._platform,
            weight_bytes=self._weight_bytes,
            planned_bytes=own_bytes + sum(feature.num_bytes() for feature in self._features),
            activation_bytes=make_programs(plan).measure_temp_bytes(tiny_cache),
        )


def _put_params(model: LoadedModule, mesh: Mesh) -> tuple[jax.Array, ...]:
    return tuple(
        jax.device_put(param, NamedSharding(mesh, spec))
        for param, spec in zip(model.params, model.param_specs, strict=True)
    )


def _choose_kernels(
    config: RunnerConfig,
    modules: Sequence[LoadedModule],
    tables: Sequence[TableShape],
    kernels: KernelSettings,
    group: RankGroup | None,
) -> KernelChoice:
    if config.batch_invariant:
        return KernelChoice("xla", "--batch-invariant uses plain XLA on every device.")
    tests = [
        test
        for module in modules
        for attention, places in zip(module.config.attention, module.places, strict=True)
        for _, place in places
        for test in place.format.self_tests(
            attention and attention.on_each_of(kernels.num_shards // kernels.num_context_ranks),
            tables[place.inputs_idx].block_size // kernels.num_context_ranks,
        )
    ]
    products = frozenset().union(*map(products_of, modules))
    scaled_products = frozenset().union(*map(scaled_products_of, modules))
    choice = choose_implementation(
        *(config.kernels, tests, products, scaled_products), kernels.mesh.local_devices[0]
    )
    if group is None:
        return choice
    # If the kernels fail on one host, plain XLA replaces them on all hosts.
    for rank, implementation in enumerate(group.exchange("kernels", choice.implementation or "")):
        if implementation == "xla" and choice.implementation != "xla":
            return KernelChoice("xla", f"host {rank} uses plain XLA; its log has the reason.")
    return choice

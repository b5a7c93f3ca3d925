"""`RunnerPlan`: the decisions of a runner that need no device."""

import dataclasses
import functools

from models import DecoderSpec, LayerPlaces, ModelConfig, Platform
from models.decoder_spec import with_drafter
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import KVCacheTooSmallError
from paxkv.runner.memory.kv_cache_arrays import kv_cache_dtype
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups, groups_of_spec
from paxkv.runner.memory.memory_plan import DeviceMemory, HostMemory, MemoryPlan, plan_memory
from paxkv.runner.memory.state_dtypes import with_state_dtypes
from paxkv.runner.ranks.rank_group import RankGroup
from paxkv.runner.shapes.bucket_sizes import SAMPLED_CHUNK_ROWS
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.program_shapes import DrafterShape, NgramShape, TableShape
from paxkv.runner.shapes.step_buckets import StepBuckets
from paxkv.runner.shapes.step_variant import StepVariant

# A prompt and an answer of one token each.
_MIN_MODEL_LEN = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """The KV cache and the programs of a runner. Each property depends on the properties above it.

    Args:
        dtype: The dtype of the model's weights.
        max_model_len: Largest number of tokens of a request, prompt and output together.
        may_be_shorter: Whether `fit` may choose a smaller `max_model_len`.
        feature_variants: For each step feature, its variants.
        own_programs: Programs of features other than steps and bursts.
        max_drafts: Most drafts of a request that a step verifies.
        num_devices: Devices of the mesh. Pages, blocks and bytes are for each device.
        num_context_ranks: Devices that share the positions of a request.
        head_config: The config of the draft head; None if there is no head.
    """

    model_config: ModelConfig
    dtype: str
    platform: Platform
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    runner_config: RunnerConfig
    max_model_len: int
    may_be_shorter: bool = False
    feature_variants: tuple[tuple[StepVariant, ...], ...] = ()
    own_programs: tuple[OwnProgram, ...] = ()
    max_drafts: int = 0
    num_devices: int = 1
    num_context_ranks: int = 1
    head_config: ModelConfig | None = None

    @functools.cached_property
    def kv_dtype(self) -> str:
        """The dtype of stored keys and values."""
        return kv_cache_dtype(self.dtype, self.platform, self.cache_config.kv_cache_dtype)

    @functools.cached_property
    def spec(self) -> DecoderSpec:
        """The caches on each device of the model's layers, and then of the draft head's layers."""
        spec = self.model_config.spec(self.kv_dtype)
        if self.head_config is not None:
            spec = with_drafter(spec, self.head_config.spec(self.kv_dtype))
        batch_invariant = self.runner_config.batch_invariant
        spec = with_state_dtypes(spec, self.cache_config, batch_invariant=batch_invariant)
        return spec.on_each_of(self.num_devices)

    @functools.cached_property
    def groups(self) -> KVCacheGroups:
        return groups_of_spec(
            self.spec,
            block_size=self.cache_config.block_size or self.platform.block_size,
            head_dim_step=self.platform.head_dim_step,
            num_context_ranks=self.num_context_ranks,
        )

    @functools.cached_property
    def places(self) -> tuple[LayerPlaces, ...]:
        """The places of the caches of each of the model's layers."""
        return self._all_places[: len(self._all_places) - self._num_head_layers]

    @functools.cached_property
    def head_places(self) -> tuple[LayerPlaces, ...]:
        """The places of the caches of each of the draft head's layers."""
        return self._all_places[len(self._all_places) - self._num_head_layers :]

    @functools.cached_property
    def _all_places(self) -> tuple[LayerPlaces, ...]:
        return self.groups.places(self.spec)

    @property
    def _num_head_layers(self) -> int:
        return 0 if self.head_config is None else self.head_config.num_layers

    @functools.cached_property
    def tables(self) -> tuple[TableShape, ...]:
        """The block tables of a step."""
        return self.groups.tables(self.max_model_len)

    @functools.cached_property
    def buckets(self) -> StepBuckets:
        """The shapes of all programs."""
        return StepBuckets(
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_decode_burst=self.scheduler_config.max_decode_burst,
            tables=self.tables,
            max_model_len=self.max_model_len,
            max_draws=1 + self.max_drafts,
            has_draft_head=self.head_config is not None,
            burst_drafts=self._burst_drafts,
            always_drafts=self.head_config is not None
            and self.runner_config.speculative_config.prevents_bursts,
            batch_invariant=self.runner_config.batch_invariant,
            sampled_chunk_rows=SAMPLED_CHUNK_ROWS if self.platform.samples_in_chunks else None,
            shares_programs=self.platform.shares_programs,
            feature_variants=self.feature_variants,
            own_programs=self.own_programs,
        )

    @property
    def _burst_drafts(self) -> NgramShape | DrafterShape | None:
        speculative = self.runner_config.speculative_config
        if speculative is None or not speculative.drafts_in_bursts:
            return None
        if speculative.is_on_device:
            return DrafterShape(num_drafts=speculative.num_speculative_tokens)
        return NgramShape.of_config(speculative)

    def fit(self, memory: DeviceMemory | HostMemory | None) -> tuple["RunnerPlan", MemoryPlan]:
        """Decides the number of blocks, and a shorter `max_model_len` if needed and allowed.

        Args:
            memory: May be None if a setting decides the size of the KV cache.

        Returns:
            This plan, or a plan with the largest `max_model_len` that fits; and the memory plan.

        Raises:
            KVCacheTooSmallError: The KV cache has no room for one request of `max_model_len`
                tokens; or of two tokens, if `may_be_shorter` is true.
        """
        plan = self
        while True:
            try:
                memory_plan = plan_memory(
                    plan.groups,
                    plan.cache_config,
                    max_model_len=plan.max_model_len,
                    max_num_batched_tokens=plan.scheduler_config.max_num_batched_tokens,
                    max_num_seqs=plan.scheduler_config.max_num_seqs,
                    memory=memory,
                    num_devices=plan.num_devices,
                )
                fitting = memory_plan.max_fitting_len
            except KVCacheTooSmallError as error:
                fitting = error.max_fitting_len
                if not self.may_be_shorter or fitting < _MIN_MODEL_LEN:
                    raise
            # A given number of blocks is accepted even if no request of `max_model_len` fits.
            if fitting >= plan.max_model_len or not self.may_be_shorter:
                return plan, memory_plan
            if fitting < _MIN_MODEL_LEN:
                raise KVCacheTooSmallError(
                    "the KV cache is too small for any request: got "
                    f"{memory_plan.kv_cache_config.num_blocks} blocks, which hold {fitting} tokens "
                    f"of one request; expected room for {_MIN_MODEL_LEN}. Set a larger "
                    "num_gpu_blocks_override."
                )
            plan = dataclasses.replace(plan, max_model_len=fitting)


def fit_all_ranks(
    plan: RunnerPlan, memory: DeviceMemory | HostMemory | None, group: RankGroup | None
) -> tuple[RunnerPlan, MemoryPlan]:
    """As `RunnerPlan.fit`, with the number of blocks of the rank that has room for the fewest."""
    fitted, memory_plan = plan.fit(memory)
    if group is None:
        return fitted, memory_plan
    num_blocks = memory_plan.kv_cache_config.num_blocks
    fewest = min(group.exchange("number of KV blocks", num_blocks))
    if fewest == num_blocks:
        return fitted, memory_plan
    cache_config = dataclasses.replace(plan.cache_config, num_gpu_blocks_override=fewest)
    return dataclasses.replace(plan, cache_config=cache_config).fit(None)

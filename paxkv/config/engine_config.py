"""All settings of an engine. They are checked at construction."""

import dataclasses

from paxkv.config.cache_config import CacheConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    runner: RunnerConfig = dataclasses.field(default_factory=RunnerConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        speculative = self.runner.speculative_config
        if speculative is not None and self.model.model is not None:
            speculative.check_has_model()
        if speculative is not None and speculative.drafts_in_bursts:
            why_none = None
            if self.runner.batch_invariant:
                why_none = "batch_invariant"
            elif self.scheduler.max_decode_burst == 1:
                why_none = "max_decode_burst=1"
            if why_none is not None:
                raise ConfigError(
                    f"speculative_config: drafts_in_bursts needs bursts, and {why_none} prevents "
                    "them. Leave one of them out."
                )
            most = self.scheduler.max_num_batched_tokens
            num_rows = 1 + speculative.num_speculative_tokens
            if num_rows > most:
                raise ConfigError(
                    f"speculative_config: with drafts_in_bursts, a step computes {num_rows} tokens "
                    "of a request (1 + num_speculative_tokens), and max_num_batched_tokens is "
                    f"{most}. Set a larger max_num_batched_tokens, or use fewer drafts."
                )
        num_ranks = self.parallel.decode_context_parallel_size
        for name, is_set in (
            ("speculative_config", speculative is not None),
            ("batch_invariant", self.runner.batch_invariant),
        ):
            if num_ranks > 1 and is_set:
                raise ConfigError(
                    f"{name} does not work with decode_context_parallel_size={num_ranks} yet. "
                    "Leave one of them out."
                )
        num_hosts = self.parallel.nnodes
        if num_hosts > 1 and self.runner.expert_load_window is not None:
            raise ConfigError(
                f"expert_load_window does not work with nnodes={num_hosts} yet. Leave it out."
            )
        most = self.runner.max_logprobs
        if num_hosts > 1 and not 0 <= most <= MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs={most} does not work with nnodes={num_hosts} yet, because each host "
                f"has a part of the logits. Use at most {MAX_LOGPROBS}."
            )

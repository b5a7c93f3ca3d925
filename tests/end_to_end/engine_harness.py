"""Drives the real scheduler and runner step by step, keeping the logits of every drawn token."""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models import load_model
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import MambaSpec
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.programs import burst as burst_module
from paxkv.runner.programs import warmup as warmup_module
from paxkv.runner.ranks.rank_group import RankGroup
from paxkv.runner.sampling import draw_rows as draw_rows_module
from paxkv.runner.sampling import sampler_program as sampler_program_module
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, SampledTokens, pack_result
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampler_program import SamplerFunction
from paxkv.runner.sampling.sampling_columns import SamplingInputs
from paxkv.runner.shapes import step_buckets
from paxkv.runner.shapes.program_shapes import SamplerShape
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 8
MAX_DECODE_BURST = 5
# Blocks in the device arrays of every runner; a run's scheduler may be given fewer.
MAX_NUM_BLOCKS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One combination of settings. The answers must be the same with all of them."""

    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 64
    block_size: int = 16
    num_blocks: int = 64
    # Steps between two arrivals, including steps of bursts; 0: all requests arrive at once.
    arrival_gap: int = 0
    # With 2 the scheduler is an AsyncScheduler.
    max_steps_in_flight: int = 1
    max_decode_burst: int = 1
    # Off, unlike in the engine, so that requests in a tiny pool are preempted.
    full_sequence_must_fit: bool = False
    # Every second request forks from the one before it.
    has_forks: bool = False


@dataclasses.dataclass(kw_only=True)
class RunResult:
    """Per request: new tokens, the logits f32[vocab] each was drawn from, and the prefix hit."""

    token_ids: list[list[int]]
    logits: list[list[np.ndarray]]
    num_cached_tokens: list[int]
    num_preemptions: int
    num_block_copies: int


def greedy(num_prompts: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy settings for each of `num_prompts` prompts, with exactly `max_tokens` new tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [params] * num_prompts


class RecordingRunner:
    """A `ModelRunner` whose steps return logits after their result, for one block size.

    It is shared by runs under different settings, so that each program is compiled once, and so
    that each run starts on a cache full of the previous run's keys and values.

    Args:
        max_num_batched_tokens: Tokens of the largest step; its runs may not allow more. With 64 or
            fewer there is one program of steps.
        has_few_sizes: Steps have two widths, 16 tokens and the largest. There is one program of
            bursts, for `MAX_NUM_SEQS` requests.
        group: The processes that compute together.
        num_context_ranks: As in `ModelRunner`.
        load_options: Other arguments of `load_model`.
    """

    def __init__(
        self,
        checkpoint: Path,
        block_size: int,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        has_unified_kv: bool = False,
        batch_invariant: bool = False,
        max_num_batched_tokens: int = 2048,
        has_few_sizes: bool = False,
        group: RankGroup | None = None,
        num_context_ranks: int = 1,
        **load_options: Any,
    ) -> None:
        self.max_model_len = max_model_len
        model = load_model(
            checkpoint,
            dtype="float32",
            has_unified_kv=has_unified_kv,
            **load_options,
        )
        self.vocab_size = model.config.vocab_size
        with returned_logits(self.vocab_size), pytest.MonkeyPatch.context() as patch:
            if has_few_sizes:
                patch.setattr(step_buckets, "token_buckets", _few_token_buckets)
                patch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))
            self.runner = ModelRunner(
                model,
                cache_config=CacheConfig(
                    block_size=block_size, num_gpu_blocks_override=MAX_NUM_BLOCKS
                ),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=MAX_NUM_SEQS,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_decode_burst=MAX_DECODE_BURST,
                ),
                max_model_len=max_model_len,
                seed=0,
                runner_config=RunnerConfig(batch_invariant=batch_invariant),
                group=group,
                num_context_ranks=num_context_ranks,
            )

    @property
    def can_hit(self) -> bool:
        """Whether the model has a prefix cache."""
        return self.runner.kv_cache_config.can_share_prefixes

    @property
    def has_states(self) -> bool:
        return self.runner.kv_cache_config.has_states

    @property
    def keeps_tokens(self) -> bool:
        """Whether a request needs more blocks as it grows. Otherwise it is never preempted."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        return not all(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)


def _few_token_buckets(max_num_batched_tokens: int, *, verifies_drafts: bool) -> tuple[int, ...]:
    return tuple(sorted({16, max_num_batched_tokens}))


@contextlib.contextmanager
def returned_logits(vocab_size: int) -> Iterator[None]:
    """In this context, a step that is traced appends its logits to its packed result.

    Only one step may be traced at a time. `warm_up` must not run here, because it traces in several
    threads.
    """
    last_logits: list[jax.Array] = []

    def recording_sample(
        logits: jax.Array,
        inputs: SamplingInputs,
        *,
        raw_logits: Callable[[], jax.Array] | None = None,
        greedy_ids: jax.Array | None = None,
        mesh: Mesh | None = None,
    ) -> SampledTokens:
        last_logits[:] = [logits]
        return sample(logits, inputs, raw_logits=raw_logits, greedy_ids=greedy_ids, mesh=mesh)

    def recording_pack(sampled: SampledTokens) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(last_logits.pop(), jnp.int32)
        return jnp.concatenate([pack_result(sampled), bits], axis=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_rows_module, "sample", recording_sample)
        patch.setattr(draw_rows_module, "pack_result", recording_pack)
        # Greedy rows have logits in their results too.
        patch.setattr(draw_rows_module, "_num_chunks", _num_chunks_of_all)
        for module in (burst_module, draw_rows_module):
            patch.setattr(module, "RESULT_WIDTH", RESULT_WIDTH + vocab_size)
        patch.setattr(warmup_module, "make_sampler", _make_recording_sampler)
        yield


_num_chunks = draw_rows_module._num_chunks


def _num_chunks_of_all(*arguments: Any, may_skip: bool) -> jax.Array:
    return _num_chunks(*arguments, may_skip=False)


@functools.cache
def _make_recording_sampler(shape: SamplerShape, mesh: Mesh | None) -> SamplerFunction:
    """One function per shape, so that JAX traces the samplers of all runners once."""
    return sampler_program_module.make_sampler(shape, mesh)


def run_engine(
    recording: RecordingRunner,
    prompts: Sequence[list[int]],
    settings: EngineSettings,
    *,
    sampling_params: Sequence[SamplingParams],
    bad_words_token_ids: Mapping[int, tuple[tuple[int, ...], ...]] = MappingProxyType({}),
    scarce_token_ids: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    watch: Callable[[Scheduler], None] = lambda scheduler: None,
) -> RunResult:
    """Generates for all prompts under the given settings. All blocks must be free at the end.

    Args:
        bad_words_token_ids: Of some of the prompts, by index; `scarce_token_ids` likewise.
        watch: Called after every step.
    """
    kv_cache_config = recording.runner.kv_cache_config
    assert settings.num_blocks <= kv_cache_config.num_blocks
    block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    assert min(block_sizes) == settings.block_size
    scheduler_class = AsyncScheduler if settings.max_steps_in_flight > 1 else Scheduler
    scheduler = scheduler_class(
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            full_sequence_must_fit=settings.full_sequence_must_fit,
        ),
        cache_config=CacheConfig(
            block_size=settings.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
        ),
        kv_cache_config=dataclasses.replace(kv_cache_config, num_blocks=settings.num_blocks),
        max_model_len=recording.max_model_len,
    )
    waiting = [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=list(prompt),
            sampling_params=params,
            bad_words_token_ids=bad_words_token_ids.get(i, ()),
            scarce_token_ids=scarce_token_ids.get(i, ()),
            fork_from=str(i - 1) if settings.has_forks and i % 2 else None,
            keep_blocks=settings.has_forks and i % 2 == 0,
        )
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
    ]
    result = RunResult(
        token_ids=[[] for _ in prompts],
        logits=[[] for _ in prompts],
        num_cached_tokens=[0] * len(prompts),
        num_preemptions=0,
        num_block_copies=0,
    )
    step = num_arrivals = 0
    in_flight: deque[tuple[SchedulerOutput, DeviceStep]] = deque()
    with returned_logits(recording.vocab_size):
        while (
            waiting
            or in_flight
            or scheduler.has_unfinished_requests()
            or scheduler.has_finished_requests()
        ):
            while waiting and num_arrivals * settings.arrival_gap <= step:
                scheduler.add_request(waiting.pop(0))
                num_arrivals += 1
            scheduler_output = scheduler.schedule(settings.max_decode_burst)
            result.num_block_copies += len(scheduler_output.block_copies)
            in_flight.append((scheduler_output, recording.runner.execute_model(scheduler_output)))
            scheduler.check_invariants()
            watch(scheduler)
            # Nothing is scheduled if all remaining tokens are in flight.
            while len(in_flight) == settings.max_steps_in_flight or (
                in_flight and not scheduler_output.num_scheduled_tokens
            ):
                _finish_step(scheduler, *in_flight.popleft(), result)
            step += scheduler_output.num_decode_steps
    # Frees the blocks that are kept for forks.
    scheduler.finish_requests(map(str, range(len(prompts))))
    stats = scheduler.make_stats()
    result.num_preemptions = stats.num_preemptions
    assert stats.num_free_blocks == settings.num_blocks - 1
    return result


def _finish_step(
    scheduler: Scheduler, scheduler_output: SchedulerOutput, step: DeviceStep, result: RunResult
) -> None:
    if scheduler_output.num_scheduled_tokens:
        bits_np = jax.device_get(step.result)[:, :, RESULT_WIDTH:]
    runner_output = step.sample_tokens()
    wanted = scheduler.steps_in_flight.get_requests(scheduler_output)
    for row, (req_id, token_ids) in enumerate(
        zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=True)
    ):
        if req_id in wanted:
            result.logits[int(req_id)] += [
                logits_np.copy().view(np.float32) for logits_np in bits_np[: len(token_ids), row]
            ]
    for output in scheduler.update_from_output(scheduler_output, runner_output):
        result.token_ids[int(output.request_id)] += output.new_token_ids
        result.num_cached_tokens[int(output.request_id)] = output.num_cached_tokens
    scheduler.check_invariants()

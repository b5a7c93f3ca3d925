"""The limits and policies of the scheduler, with their help texts."""

import dataclasses
from typing import Literal

from paxkv.config.setting import at_least, one_of, setting, true_or_false
from paxkv.errors import ConfigError

SchedulerPolicy = Literal["fcfs", "priority"]
MAX_DECODE_BURST = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits and policies of the scheduler."""

    max_num_seqs: int = setting("largest number of requests that run at the same time", 64)
    max_num_batched_tokens: int = setting(
        "token budget of a step, prefill and decode together", 512
    )
    enable_chunked_prefill: bool = setting(
        "split a prompt over several steps if it exceeds the token budget", True
    )
    long_prefill_token_threshold: int = setting(
        "largest number of tokens of one request in one step; 0 is no limit", 0
    )
    policy: SchedulerPolicy = setting(
        "order of waiting requests: by arrival, or by priority (lower first), then arrival",
        "fcfs",
        aliases=("--scheduling-policy",),
    )
    full_sequence_must_fit: bool = setting(
        "admit a request only if its whole prompt fits into the free KV blocks, and not only its "
        "first part; without it, more requests start, and more are preempted",
        True,
        aliases=("--scheduler-reserve-full-isl",),
    )
    # Hidden until a model with an encoder can be served.
    max_num_encoder_input_tokens: int = setting(
        "encoder tokens, of images for example, that one step may compute", 2048, is_hidden=True
    )
    encoder_cache_size: int = setting("encoder tokens whose outputs are kept", 2048, is_hidden=True)
    async_scheduling: bool = setting(
        "decide the next step while the device computes the current one; this does not change "
        "answers",
        True,
    )
    max_decode_burst: int = setting(
        "largest number of decode steps that the device computes without the host, while no "
        "request waits; the engine uses fewer while requests arrive, and if clients would receive "
        "tokens in bursts",
        8,
    )
    trace_file: str | None = setting(
        "write every arrival, decision and block movement to this file, one JSON line per step, "
        "for `python -m paxkv.replay`",
        None,
    )

    def __post_init__(self) -> None:
        true_or_false("enable_chunked_prefill", self.enable_chunked_prefill)
        true_or_false("full_sequence_must_fit", self.full_sequence_must_fit)
        true_or_false("async_scheduling", self.async_scheduling)
        at_least("max_decode_burst", self.max_decode_burst, 1)
        if self.max_decode_burst > MAX_DECODE_BURST:
            raise ConfigError(
                f"max_decode_burst must be at most {MAX_DECODE_BURST}, got "
                f"{self.max_decode_burst}: longer bursts gain nothing, and every step of a burst "
                "needs memory for its result."
            )
        at_least("max_num_encoder_input_tokens", self.max_num_encoder_input_tokens, 0)
        at_least("encoder_cache_size", self.encoder_cache_size, 0)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        one_of("policy", self.policy, SchedulerPolicy.__args__)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running request needs a token per step."
            )

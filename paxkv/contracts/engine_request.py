"""Messages from a client to the engine core: new requests, aborts, control calls."""

import dataclasses

from paxkv.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request, checked and tokenised, as the engine core takes it.

    Args:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token id, each in `[0, vocab_size)`.
        sampling_params: `max_tokens` is a number here, already cut to max_model_len.
        eos_token_ids: Tokens that end the request unless `ignore_eos`. The first is the
            tokenizer's EOS; the rest come from generation_config.json.
        arrival_time: Seconds since the epoch.
        priority: Lower runs first under the priority policy; ties by arrival.
        cache_salt: Separates prefix-cache entries of tenants; None shares with everyone.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """Start a request."""

    request: EngineRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End requests at once; unknown or finished ids are ignored."""

    request_ids: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UtilityCall:
    """A control call by name, answered by a `UtilityReply` with the same `call_id`.

    Methods: `reset_prefix_cache`, `get_stats`, `check_invariants`.
    """

    call_id: int
    method: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Ask the engine to end. With `drain`, unfinished requests run to their end first."""

    drain: bool = False


# What a client may send; `contracts/wire.py` writes them as bytes.
EngineInput = AddRequest | AbortRequests | UtilityCall | Shutdown

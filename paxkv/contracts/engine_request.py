"""Messages from a client to the engine core: new requests, aborts, control calls."""

import dataclasses

from paxkv.config.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalFeature:
    """One image, sound or other item whose encoder outputs stand at prompt positions.

    Args:
        identifier: Names its content: equal items have equal identifiers.
        offset: First prompt position that it fills.
        length: Prompt positions that it fills, which is also its number of encoder tokens.
    """

    identifier: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request, checked and tokenised, as the engine core takes it.

    Args:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token id, each in `[0, vocab_size)`.
        sampling_params: `max_tokens` is a number here, already cut to max_model_len.
        eos_token_ids: Tokens that end the request unless `ignore_eos`. The first is the
            tokenizer's EOS, or config.json's where there is none, and ends it without a stop
            reason; the others are their own.
        arrival_time: Seconds since the epoch.
        priority: Lower runs first under the priority policy; ties by arrival.
        cache_salt: Separates prefix-cache entries of tenants; None shares with everyone.
        lora_name: Adapter that its K and V are computed with; None is the base model.
        mm_features: In the order of their positions, which do not overlap.
        bad_words_token_ids: Token sequences of `bad_words`, none of which its output may have.
        scarce_token_ids: Where bad words of several tokens and `min_tokens` may rule out all that
            its other settings let it draw: those tokens. It ends where none of them is left. Empty
            for nearly every request.
        needs_grammar: Its tokens are bound by a grammar, which must be compiled before it runs.
        has_heavy_grammar: Compiling it takes so long that others should not wait behind it.
        is_pooled: It draws no token. It ends with a `pooling_output` when its prompt is computed.
        fork_from: Request whose blocks this one shares, as far as the tokens of the two are equal
            and up to the last token of this one's prompt, which is always computed. It waits
            until they are computed; where that cannot be any more, it is computed from its tokens.
        num_truncated_tokens: Prompt tokens that `truncate_prompt_tokens` removed, for the answer.
        is_streamed: Somebody reads its tokens as they come; bursts are shorter then.
        keep_blocks: Its blocks stay after its end, for requests that fork from it, until it is
            aborted or their memory is needed.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    scarce_token_ids: tuple[int, ...] = ()
    needs_grammar: bool = False
    has_heavy_grammar: bool = False
    is_pooled: bool = False
    fork_from: str | None = None
    keep_blocks: bool = False
    is_streamed: bool = False
    num_truncated_tokens: int = 0


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

    Methods: `reset_prefix_cache`, `get_stats`, `check_invariants`, `explain_prefix_cache_miss`,
    `inspect` and `inspect_block` (see `contracts/observation.py`).

    Args:
        arguments: Passed to the method in order.
    """

    call_id: int
    method: str
    arguments: tuple[str | int | bool, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Ask the engine to end. With `drain`, unfinished requests run to their end first."""

    drain: bool = False


# What a client may send; `contracts/wire.py` writes them as bytes.
EngineInput = AddRequest | AbortRequests | UtilityCall | Shutdown

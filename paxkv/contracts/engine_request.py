"""Messages from a client to the engine core: new requests, aborts, control calls."""

import dataclasses

from paxkv.config.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalFeature:
    """One image, audio clip or other item whose encoder outputs fill prompt positions.

    Args:
        identifier: Identifies the item's content; equal items have equal identifiers.
        offset: First prompt position of the item.
        length: Number of prompt positions, which is also the item's number of encoder tokens.
    """

    identifier: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One checked and tokenized request, as the engine core receives it.

    Args:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token id, each in `[0, vocab_size)`.
        sampling_params: `max_tokens` is a number here, already limited by max_model_len.
        eos_token_ids: Tokens that end the request unless `ignore_eos`. The first is the
            tokenizer's EOS token, or that of config.json, and ends the request without a stop
            reason. For the others, the stop reason is their id.
        arrival_time: Seconds since the epoch.
        priority: Under the priority policy, requests with lower numbers run first. Ties are broken
            by arrival.
        cache_salt: Requests share cached prefixes only with requests that have the same salt.
        lora_name: LoRA adapter with which K and V are computed; None for the base model.
        mm_features: Items in the order of their positions, which do not overlap.
        bad_words_token_ids: Token sequences that must not occur in the output.
        scarce_token_ids: All tokens that the request's other settings allow, if bad words of
            several tokens and `min_tokens` together might forbid all of them. The request ends when
            none of them is allowed. Empty for nearly every request.
        needs_grammar: A grammar restricts the tokens. It must be compiled before the request runs.
        has_heavy_grammar: Compiling the grammar takes so long that other grammars should not wait
            for it.
        is_pooled: The request samples no token. It ends with a `pooling_output` when its prompt is
            computed.
        fork_from: Id of the request whose blocks this request shares, for their common prefix
            without the last prompt token. The request waits until these tokens are computed. If
            the blocks are no longer available, the prompt is computed from its tokens.
        num_truncated_tokens: Prompt tokens that `truncate_prompt_tokens` removed.
        num_leading_tokens: Prompt tokens of the leading messages of a chat, which other chats are
            likely to have too; 0 if unknown. The states of recurrent layers are saved there.
        is_streamed: The client reads the tokens as they are sampled, so bursts are shorter.
        keep_blocks: Keep the blocks after the request's end, for requests that fork from it, until
            it is aborted or their memory is needed.
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
    num_leading_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """Start a request."""

    request: EngineRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End requests immediately; unknown and finished ids are ignored."""

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
    """End the engine. With `drain`, unfinished requests run to their end first."""

    drain: bool = False


# Messages that a client may send; `contracts/wire.py` encodes them.
EngineInput = AddRequest | AbortRequests | UtilityCall | Shutdown

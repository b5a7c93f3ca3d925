"""The positions at which the states of recurrent layers are saved.

Other requests can continue from a state only if it was saved: later tokens overwrite it. States are
saved at multiples of the block size

- before the last tokens of the prompt, as late as possible;
- before the end of the leading messages of a chat, as late as possible (`num_leading_tokens`);
- where a look-up found keys and values, but no state (`state_save_at`);
- while the request decodes, at every multiple that it passes.

A request from which others fork also saves the state before the last token of its prompt.
"""

import sys

from paxkv.contracts.kv_cache_spec import cdiv
from paxkv.contracts.protocols import CacheRequest


def is_fork_point(request: CacheRequest, num_tokens: int) -> bool:
    """Whether forks of a running request continue after its first `num_tokens` tokens."""
    return request.keeps_state_for_forks and num_tokens == request.num_prompt_tokens - 1


def is_save_point(request: CacheRequest, num_tokens: int, block_size: int) -> bool:
    """Whether the state after `num_tokens` tokens is saved for the prefix cache."""
    if num_tokens % block_size or num_tokens == 0:
        return False
    return num_tokens >= request.num_prompt_tokens or num_tokens in _prompt_points(
        request, block_size
    )


def cut_at_save_point(
    request: CacheRequest, num_computed_tokens: int, num_new_tokens: int, block_size: int | None
) -> int:
    """Number of new tokens that a step may compute: up to the first save point among them.

    Args:
        block_size: None without prefix caching.
    """
    points = []
    if request.keeps_state_for_forks:
        points.append(request.num_prompt_tokens - 1)
    if block_size is not None:
        points += _prompt_points(request, block_size)
    end = num_computed_tokens + num_new_tokens
    end = min((point for point in points if num_computed_tokens < point < end), default=end)
    return end - num_computed_tokens


def max_tokens_before_save(
    request: CacheRequest, block_size: int | None, *, is_step_decided: bool = False
) -> int:
    """Number of tokens up to which the request has no state to save.

    Args:
        block_size: None without prefix caching.
        is_step_decided: The next step has its slots, so the state before it needs no more work.
    """
    num_tokens = request.num_computed_tokens + is_step_decided
    limit = sys.maxsize
    if block_size is not None:
        limit = cdiv(num_tokens, block_size) * block_size
    if request.keeps_state_for_forks and num_tokens < request.num_prompt_tokens:
        limit = min(limit, request.num_prompt_tokens - 1)
    return limit


def _prompt_points(request: CacheRequest, block_size: int) -> tuple[int, ...]:
    """The save points within the prompt, or within the tokens of a resumed request."""
    return (
        (request.num_tokens - 1) // block_size * block_size,
        request.num_leading_tokens // block_size * block_size,
        request.state_save_at,
    )

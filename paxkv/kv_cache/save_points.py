"""The positions at which the states of recurrent layers are saved.

Other requests can continue from a state only if it was saved: later tokens overwrite it. States are
saved at multiples of the block size

- before the last tokens of the prompt, as late as possible;
- before the end of the leading messages of a chat, as late as possible (`num_leading_tokens`);
- where a look-up found keys and values, but no state (`state_save_at`);
- at every multiple of `--state-save-interval` within the prompt;
- while the request decodes, at every multiple that it passes.

A request from which others fork also saves the state before the last token of its prompt.
"""

import dataclasses
import sys

from paxkv.contracts.kv_cache_spec import cdiv
from paxkv.contracts.protocols import CacheRequest


def is_fork_point(request: CacheRequest, num_tokens: int) -> bool:
    """Whether forks of a running request continue after its first `num_tokens` tokens."""
    return request.keeps_state_for_forks and num_tokens == request.num_prompt_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePoints:
    """Where the requests of an engine save their states.

    Args:
        block_size: States are saved for the prefix cache at multiples of this number. None: only
            for forks.
        interval: A multiple of `block_size`; states of prompts are saved at its multiples. None:
            only at the other save points.
    """

    block_size: int | None
    interval: int | None = None

    def contains(self, request: CacheRequest, num_tokens: int) -> bool:
        """Whether the state after `num_tokens` tokens is saved for the prefix cache."""
        if self.block_size is None or num_tokens % self.block_size or num_tokens == 0:
            return False
        return (
            num_tokens >= request.num_prompt_tokens
            or (self.interval is not None and num_tokens % self.interval == 0)
            or num_tokens in _prompt_points(request, self.block_size)
        )

    def cut(
        self,
        request: CacheRequest,
        num_computed_tokens: int,
        num_new_tokens: int,
        *,
        has_drafts: bool = False,
    ) -> int:
        """Number of new tokens that a step may compute: up to the first save point among them.

        Args:
            has_drafts: The last tokens are drafts. Only the state before them is written, so drafts
                may take the request to the next multiple, but not past it.
        """
        if has_drafts and self.block_size is not None:
            # Block size 16, 13 tokens: with two right drafts and a new token, there are 16 tokens.
            most = request.num_tokens // self.block_size * self.block_size + self.block_size - 1
            num_new_tokens = min(num_new_tokens, most - num_computed_tokens)
        points = []
        if request.keeps_state_for_forks:
            points.append(request.num_prompt_tokens - 1)
        if self.block_size is not None:
            points += _prompt_points(request, self.block_size)
        if self.interval is not None:
            points.append((num_computed_tokens // self.interval + 1) * self.interval)
        end = num_computed_tokens + num_new_tokens
        # A step with drafts writes the state before them, so a point there needs no cut.
        last = min(end, request.num_tokens) if has_drafts else end
        end = min((point for point in points if num_computed_tokens < point < last), default=end)
        return end - num_computed_tokens

    def max_tokens_before(self, request: CacheRequest, *, is_step_decided: bool = False) -> int:
        """Number of tokens up to which the request has no state to save.

        Args:
            is_step_decided: The next step has its slots, so the state before it needs no more work.
        """
        num_tokens = request.num_computed_tokens + is_step_decided
        limit = sys.maxsize
        if self.block_size is not None:
            limit = cdiv(num_tokens, self.block_size) * self.block_size
        if request.keeps_state_for_forks and num_tokens < request.num_prompt_tokens:
            limit = min(limit, request.num_prompt_tokens - 1)
        return limit


def _prompt_points(request: CacheRequest, block_size: int) -> tuple[int, ...]:
    """Save points within the prompt, or within the tokens of a resumed request."""
    return (
        (request.num_tokens - 1) // block_size * block_size,
        request.num_leading_tokens // block_size * block_size,
        request.state_save_at,
    )

"""`ParentRequest`: a caller's request for n completions, which are n requests of the engine."""

import dataclasses
from typing import Literal

from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput

# Whether an output holds everything so far, only what is new, or comes only at the end.
OutputKind = Literal["cumulative", "delta", "final_only"]
PromptLogprobs = list[dict[int, Logprob] | None]


class ParentRequest:
    """Sends one child a completion to the engine, and puts together what comes back.

    With several, child 0 computes the prompt and keeps its blocks; the others fork from it, so
    that the prompt's keys and values exist once. When all have blocks of their own and child 0 has
    ended, the kept ones are released.

    Args:
        prompt: The prompt as text, if it came so.
        output_kind: With "final_only" there is one output, when all children have ended.

    Source: vLLM `v1/engine/parallel_sampling.py`.
    """

    def __init__(
        self, request: EngineRequest, *, prompt: str | None, output_kind: OutputKind
    ) -> None:
        self.request_id = request.request_id
        self.children = make_children(request)
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._num_truncated_tokens = request.num_truncated_tokens
        self._is_final_only = output_kind == "final_only"
        self._is_delta = output_kind == "delta"
        self._unfinished = set(range(len(self.children)))
        # Children without a token yet: they may still need the blocks of child 0.
        self._not_begun = set(range(len(self.children)))
        self._holds_kept_blocks = len(self.children) > 1 and self.children[0].keep_blocks
        # What the caller has not been given yet.
        self._completions: dict[int, CompletionOutput] = {}
        self._num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def take(
        self, index: int, completion: CompletionOutput | None, *, num_cached_tokens: int
    ) -> None:
        """Takes what a step made of child `index`; None where the caller is not to hear of it."""
        self._not_begun.discard(index)
        if index == 0:
            # The prompt is looked up in the prefix cache once; forks have it from child 0.
            self._num_cached_tokens = num_cached_tokens
        if completion is None:
            return
        self._completions[index] = completion
        if completion.finished:
            self._unfinished.discard(index)

    def take_prompt_logprobs(self, prompt_logprobs: PromptLogprobs) -> None:
        """Takes what child 0 brings with its first token."""
        self._prompt_logprobs = prompt_logprobs

    def take_output(self) -> RequestOutput | None:
        """What the caller has not been given yet; None when that is nothing, or not ready."""
        if not self._completions or (self._is_final_only and self._unfinished):
            return None
        completions, self._completions = self._completions, {}
        prompt_logprobs = self._prompt_logprobs
        if self._is_delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completions[index] for index in sorted(completions)],
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            num_truncated_tokens=self._num_truncated_tokens,
        )

    def take_released_ids(self) -> list[str]:
        """Child 0's id, once, when nobody can fork from its kept blocks any more."""
        if not self._holds_kept_blocks or 0 in self._unfinished or self._not_begun:
            return []
        self._holds_kept_blocks = False
        return [self.children[0].request_id]


def make_children(request: EngineRequest) -> list[EngineRequest]:
    """The engine's requests for the `n` completions that `request` asks for, by index.

    n=3 of request "7" with seed 5 -> "0_7", "1_7" and "2_7" with seeds 5, 6 and 7. Without a seed
    the engine derives each one's own from its id.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    # A fork computes the last token of its prompt itself: of one token there is nothing to share.
    is_shared = len(request.prompt_token_ids) > 1 and not params.skip_reading_prefix_cache
    source_id = f"0_{request.request_id}"
    return [
        dataclasses.replace(
            request,
            request_id=f"{index}_{request.request_id}",
            sampling_params=dataclasses.replace(
                params,
                n=1,
                seed=_child_seed(params.seed, index),
                # The prompt is one and the same.
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            keep_blocks=is_shared and index == 0,
            fork_from=source_id if is_shared and index > 0 else None,
        )
        for index in range(params.n)
    ]


def _child_seed(seed: int | None, index: int) -> int | None:
    # Wraps within the 64 signed bits that a seed has.
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63

"""`ParentRequest`: a caller's request for n completions, which becomes n engine requests."""

import dataclasses
from typing import Literal

from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput

# "cumulative" outputs have all tokens so far, and "delta" outputs only the new tokens. "final_only"
# is one output at the end.
OutputKind = Literal["cumulative", "delta", "final_only"]
PromptLogprobs = list[dict[int, Logprob] | None]


class ParentRequest:
    """Splits a request into one child per completion and combines the children's outputs.

    With several children, child 0 computes the prompt and keeps its blocks. The others fork from
    it, so the prompt's keys and values are stored once. The kept blocks are released when child 0
    has ended and all others have blocks of their own.

    Args:
        prompt: The prompt as text; None if it was sent as token ids.
        output_kind: With "final_only", there is one output when all children have ended.

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
        # Children without a step so far: they may still need the blocks of child 0.
        self._without_step = set(range(len(self.children)))
        self._holds_kept_blocks = len(self.children) > 1 and self.children[0].keep_blocks
        # Completions that were not returned to the caller yet.
        self._completions: dict[int, CompletionOutput] = {}
        self._num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def record_step(
        self, index: int, completion: CompletionOutput | None, *, num_cached_tokens: int
    ) -> None:
        """Records a step of child `index`; `completion` is None if there is no output for it."""
        self._without_step.discard(index)
        if index == 0:
            # Child 0 looks up the prompt in the prefix cache; forks share its blocks.
            self._num_cached_tokens = num_cached_tokens
        if completion is None:
            return
        self._completions[index] = completion
        if completion.finished:
            self._unfinished.discard(index)

    def set_prompt_logprobs(self, prompt_logprobs: PromptLogprobs) -> None:
        """Stores the prompt log-probabilities, which arrive with child 0's first token."""
        self._prompt_logprobs = prompt_logprobs

    def pop_output(self) -> RequestOutput | None:
        """Returns the output that is new for the caller; None if there is none yet."""
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

    def pop_released_ids(self) -> list[str]:
        """Returns child 0's id once, when its kept blocks are no longer needed for forks."""
        if not self._holds_kept_blocks or 0 in self._unfinished or self._without_step:
            return []
        self._holds_kept_blocks = False
        return [self.children[0].request_id]


def make_children(request: EngineRequest) -> list[EngineRequest]:
    """Returns the engine's requests for the `n` completions of `request`, by index.

    n=3 of request "7" with seed 5 -> "0_7", "1_7" and "2_7" with seeds 5, 6 and 7. Without a seed,
    the engine derives a seed from each id.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    # A fork computes the last prompt token itself, so forks of a one-token prompt share nothing.
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
                # All children have the same prompt.
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            keep_blocks=is_shared and index == 0,
            fork_from=source_id if is_shared and index > 0 else None,
        )
        for index in range(params.n)
    ]


def _child_seed(seed: int | None, index: int) -> int | None:
    # Wraps around in int64.
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63

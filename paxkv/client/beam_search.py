"""`BeamSearch`: searches the most likely continuations of one prompt, step by step.

In each step, every live beam becomes an engine request for one token with log-probabilities. The
request forks from its parent's request, so the engine computes only the newest token.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import FinishReason
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.text.detokenizer import IncrementalDetokenizer
from paxkv.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Beam:
    """A sequence: prompt and new tokens.

    Args:
        length: Number of `tokens`, not counting an EOS that ended the beam.
        parent_id: Request that computed all tokens except the last; None for the prompt.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    length: int
    parent_id: str | None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A beam plus one token. Only chosen candidates copy the beam's tokens, in `to_beam`."""

    beam: _Beam
    beam_id: str
    token_id: int
    logprobs: dict[int, Logprob]
    cum_logprob: float
    length: int

    def to_beam(self) -> _Beam:
        return _Beam(
            tokens=[*self.beam.tokens, self.token_id],
            logprobs=[*self.beam.logprobs, self.logprobs],
            cum_logprob=self.cum_logprob,
            length=self.length,
            parent_id=self.beam_id,
            # An EOS does not count in the length.
            finish_reason="stop" if self.length == self.beam.length else None,
        )


def prompt_params(params: BeamSearchParams) -> SamplingParams:
    """Returns parameters with which the input processor checks the prompt and `max_tokens`.

    The input processor replaces a `max_tokens` of None, as for any request.

    Raises:
        InvalidRequestError: `params` is not a BeamSearchParams.
    """
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(
            f"a beam search takes BeamSearchParams, got {type(params).__name__}."
        )
    return SamplingParams(max_tokens=params.max_tokens)


_Ranked = TypeVar("_Ranked", _Beam, _Candidate)


class BeamSearch:
    """The state of a beam search. It sends no requests itself.

    In each step, the caller sends `next_requests` to the engine and passes each output to
    `record_output`. Then it aborts `released_ids` in the engine and calls `clear_released_ids`. The
    search ends when `next_requests` is empty. To end it early, the caller aborts all `request_ids`.

    Args:
        request: The prompt. `max_tokens` is the number of steps; `eos_token_ids` end a beam.
        vocab_size: Upper bound of the candidates per beam.

    Source: vLLM `beam_search.py`, and `beam_search` in `entrypoints/llm.py`.
    """

    def __init__(
        self, request: EngineRequest, params: BeamSearchParams, *, vocab_size: int
    ) -> None:
        self._request = request
        self._params = params
        self._num_candidates = min(2 * params.beam_width, vocab_size)
        self._eos_token_ids = frozenset(() if params.ignore_eos else request.eos_token_ids)
        prompt = _Beam(
            tokens=request.prompt_token_ids,
            logprobs=[],
            cum_logprob=0.0,
            length=len(request.prompt_token_ids),
            parent_id=None,
        )
        self._live = [prompt]
        self._ended: list[_Beam] = []
        self._num_steps = 0
        # By request id of the current step.
        self._step_beams: dict[str, _Beam] = {}
        self._answers: dict[str, CompletionOutput] = {}
        # Requests of the previous step from which the current step's requests fork.
        self._parent_ids: list[str] = []
        # Requests whose kept blocks are no longer needed for forks.
        self.released_ids: list[str] = []
        self.num_cached_tokens = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids

    @property
    def request_ids(self) -> list[str]:
        """All requests that the engine may still compute or keep blocks for."""
        return [*self.released_ids, *self._parent_ids, *self._step_beams]

    def next_requests(self) -> list[EngineRequest]:
        """Returns one request per live beam; an empty list when the search has ended."""
        if self._is_done:
            return []
        ids = [f"{self._num_steps}_{i}_{self.request_id}" for i in range(len(self._live))]
        self._step_beams = dict(zip(ids, self._live, strict=True))
        params = SamplingParams(
            max_tokens=1,
            temperature=self._params.temperature,
            logprobs=self._num_candidates,
            # `_candidates` handles EOS tokens.
            ignore_eos=True,
            detokenize=False,
        )
        return [
            dataclasses.replace(
                self._request,
                request_id=request_id,
                prompt_token_ids=beam.tokens,
                sampling_params=params,
                fork_from=beam.parent_id,
                keep_blocks=True,
            )
            for request_id, beam in self._step_beams.items()
        ]

    def record_output(self, output: RequestOutput) -> bool:
        """Records the final output of one of the `next_requests`.

        Returns:
            True if it completes the step; then the next beams are chosen.

        Raises:
            InvariantError: The engine rejected the request.
        """
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            raise InvariantError(
                f"the engine refused request {output.request_id!r} of a beam search, although the "
                "prompt was checked before. The engine's log contains the reason."
            )
        if self._num_steps == 0:
            self.num_cached_tokens = output.num_cached_tokens
        self._answers[output.request_id] = completion
        if len(self._answers) < len(self._step_beams):
            return False
        self._choose()
        return True

    def clear_released_ids(self) -> None:
        """Clears `released_ids`, after the caller aborted them in the engine."""
        self.released_ids = []

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Returns the best sequences after the last step."""
        return BeamSearchOutput(
            sequences=[
                BeamSearchSequence(
                    tokens=beam.tokens,
                    logprobs=beam.logprobs,
                    cum_logprob=beam.cum_logprob,
                    text=self._whole_text(beam, tokenizer),
                    finish_reason=beam.finish_reason or "length",
                )
                for beam in self._best([*self._ended, *self._live])
            ]
        )

    def completions(
        self, tokenizer: Tokenizer | None, *, is_aborted: bool = False
    ) -> list[CompletionOutput]:
        """Returns the best sequences without the prompt, as completions.

        Args:
            is_aborted: The search ended before its last step.
        """
        reason = "abort" if is_aborted else "length"
        num_prompt_tokens = len(self.prompt_token_ids)
        return [
            CompletionOutput(
                index=index,
                text=self._new_text(beam, tokenizer),
                token_ids=beam.tokens[num_prompt_tokens:],
                cumulative_logprob=beam.cum_logprob,
                logprobs=beam.logprobs,
                finish_reason=beam.finish_reason or reason,
            )
            for index, beam in enumerate(self._best([*self._ended, *self._live]))
        ]

    @property
    def _is_done(self) -> bool:
        return not self._live or self._num_steps == self._request.sampling_params.max_tokens

    def _choose(self) -> None:
        """Ends the step: chooses the next beams from the candidates of all beams."""
        candidates = [
            candidate
            for beam_id, beam in self._step_beams.items()
            for candidate in self._candidates(beam, beam_id)
        ]
        ended = [c for c in candidates if c.length == c.beam.length]
        continued = [c for c in candidates if c.length > c.beam.length]
        self._ended = self._best([*self._ended, *(c.to_beam() for c in self._best(ended))])
        self._live = [candidate.to_beam() for candidate in self._best(continued)]
        self._num_steps += 1
        parents = set() if self._is_done else {beam.parent_id for beam in self._live}
        # The forks of the previous parents are computed, so the parents' blocks can be released.
        self.released_ids += [*self._parent_ids, *(i for i in self._step_beams if i not in parents)]
        self._parent_ids = [i for i in self._step_beams if i in parents]
        self._step_beams, self._answers = {}, {}

    def _candidates(self, beam: _Beam, beam_id: str) -> list[_Candidate]:
        (logprobs,) = self._answers[beam_id].logprobs
        return [
            _Candidate(
                beam=beam,
                beam_id=beam_id,
                token_id=token_id,
                logprobs=logprobs,
                cum_logprob=beam.cum_logprob + logprob.logprob,
                length=beam.length + (token_id not in self._eos_token_ids),
            )
            for token_id, logprob in logprobs.items()
        ]

    def _best(self, found: Sequence[_Ranked]) -> list[_Ranked]:
        """Returns the `beam_width` best, best first; ties keep their order."""

        def score(one: _Ranked) -> float:
            return one.cum_logprob / one.length**self._params.length_penalty

        return sorted(found, key=score, reverse=True)[: self._params.beam_width]

    def _shown_tokens(self, beam: _Beam) -> list[int]:
        is_whole = self._params.include_stop_str_in_output
        return beam.tokens if is_whole else beam.tokens[: beam.length]

    def _whole_text(self, beam: _Beam, tokenizer: Tokenizer | None) -> str:
        if tokenizer is None:
            return ""
        return tokenizer.decode(self._shown_tokens(beam), skip_special_tokens=False)

    def _new_text(self, beam: _Beam, tokenizer: Tokenizer | None) -> str:
        if tokenizer is None:
            return ""
        params = SamplingParams(skip_special_tokens=not self._params.include_stop_str_in_output)
        # Detokenize after the prompt, because some tokenizers drop a space at the start of a text.
        detokenizer = IncrementalDetokenizer(tokenizer, self.prompt_token_ids, params)
        new_tokens = self._shown_tokens(beam)[len(self.prompt_token_ids) :]
        detokenizer.update(new_tokens, is_last=True)
        return detokenizer.text

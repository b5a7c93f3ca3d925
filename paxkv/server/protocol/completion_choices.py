"""`CompletionChoices`: outputs of the engine as choices of /v1/completions, whole or in parts."""

import dataclasses
from collections.abc import Sequence

from msgspec import UNSET

from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.server.engine_protocol import Tokenizer
from paxkv.server.protocol.openai_protocol import CompletionRequest
from paxkv.server.protocol.openai_responses import (
    CompletionChoice,
    choice_index,
    completion_logprobs,
    has_news,
    prompt_logprobs,
)
from paxkv.server.protocol.sampling_fields import echoes_prompt_alone


def best_completions(
    completions: Sequence[CompletionOutput], num_kept: int
) -> list[CompletionOutput]:
    """Those with the highest log-probability per token, the best first, as choices from 0 on.

    Of equally likely ones that of the lower index is kept. All must have ended.
    """
    ranked = sorted(completions, key=_mean_logprob, reverse=True)[:num_kept]
    return [dataclasses.replace(kept, index=index) for index, kept in enumerate(ranked)]


def _mean_logprob(completion: CompletionOutput) -> float:
    if completion.cumulative_logprob is None:
        raise InvariantError(f"completion {completion.index} cannot be ranked without logprobs.")
    return completion.cumulative_logprob / max(len(completion.token_ids), 1)


class CompletionChoices:
    """Makes the choices of one HTTP request; each begins with its prompt where that is echoed.

    Args:
        prompts: In the request's order.
        tokenizer: Makes text of echoed prompts that came as token ids.

    Raises:
        InvalidRequestError: There is no tokenizer, and the request needs one.
    """

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
        tokenizer: Tokenizer | None,
    ) -> None:
        if body.echo and tokenizer is None:
            raise InvalidRequestError(
                "echo shows the prompt as text, and this model was loaded without a tokenizer; "
                "leave it out.",
                param="echo",
            )
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._is_prompt_alone = echoes_prompt_alone(body)
        self._text_offsets = [0] * len(prompts) * body.num_choices
        self._begun: set[int] = set()
        # A stream has them once, maybe before some of the choices begin.
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}

    def kept(self, output: RequestOutput) -> list[CompletionOutput]:
        """The completions of an output that become choices: with `best_of`, the best ones."""
        if self._body.num_drawn > self._body.num_choices:
            return best_completions(output.outputs, self._body.num_choices)
        return output.outputs

    def take(
        self, prompt_idx: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice | None:
        """The choice of one completion of an output; None where there is no news of it."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_idx] = output.prompt_logprobs
        index = choice_index(prompt_idx, completion, self._body.num_choices)
        is_new = has_news(completion, shows_token_ids=bool(self._body.return_token_ids))
        if is_new or (self._body.echo and index not in self._begun):
            return self._choice(index, prompt_idx, output, completion)
        return None

    def num_tokens(self, completion: CompletionOutput) -> int:
        """Its tokens that the caller asked for: none where the prompt alone is scored."""
        return 0 if self._is_prompt_alone else len(completion.token_ids)

    def _choice(
        self, index: int, prompt_idx: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        body = self._body
        is_first = index not in self._begun
        self._begun.add(index)
        has_prompt = bool(body.echo) and is_first
        text = "" if self._is_prompt_alone else completion.text
        token_ids = [] if self._is_prompt_alone else completion.token_ids
        positions = [] if self._is_prompt_alone else completion.logprobs or []
        if has_prompt:
            text = self._prompt_text(prompt_idx, output) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*self._prompt_logprobs.get(prompt_idx, ()), *positions]
        logprobs = None
        # A beam search has them all the same.
        if body.logprobs is not None and completion.logprobs is not None:
            logprobs = completion_logprobs(
                token_ids,
                positions,
                body.logprobs,
                text_offset=self._text_offsets[index],
                as_token_ids=bool(body.return_tokens_as_token_ids),
                decode=self._token_text,
            )
            if logprobs.tokens:
                last_text = self._text_of(token_ids[-1], positions[-1])
                self._text_offsets[index] = logprobs.text_offset[-1] + len(last_text)
        finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
        if self._is_prompt_alone and completion.finished:
            # Not why the token ended it that nobody asked for.
            finish_reason, stop_reason = "length", None
        scored = self._prompt_logprobs.get(prompt_idx)
        shows_scores = body.prompt_logprobs is not None and scored is not None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=prompt_logprobs(scored) if shows_scores else UNSET,
            token_ids=token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=(
                output.prompt_token_ids if body.return_token_ids and is_first else UNSET
            ),
        )

    def _prompt_text(self, prompt_idx: int, output: RequestOutput) -> str:
        prompt = self._prompts[prompt_idx]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _text_of(self, token_id: int, position: dict[int, Logprob] | None) -> str:
        # Not what is shown of it, which may be "token_id:17".
        return self._token_text(token_id) if position is None else position[token_id].decoded_token

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

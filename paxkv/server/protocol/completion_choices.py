"""`CompletionChoices`: converts outputs of the engine to choices of /v1/completions."""

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
    has_new_content,
    prompt_logprobs,
)
from paxkv.server.protocol.sampling_fields import echoes_prompt_only


def best_completions(
    completions: Sequence[CompletionOutput], num_kept: int
) -> list[CompletionOutput]:
    """Selects the completions with the highest log-probability per token, and renumbers them.

    The best one gets index 0. All completions must have ended.
    """
    ranked = sorted(completions, key=_mean_logprob, reverse=True)[:num_kept]
    return [dataclasses.replace(kept, index=index) for index, kept in enumerate(ranked)]


def _mean_logprob(completion: CompletionOutput) -> float:
    if completion.cumulative_logprob is None:
        raise InvariantError(f"completion {completion.index} cannot be ranked without logprobs.")
    return completion.cumulative_logprob / max(len(completion.token_ids), 1)


class CompletionChoices:
    """Makes the choices of one HTTP request. With `echo`, each begins with its prompt.

    Args:
        prompts: The prompts in the request's order.
        tokenizer: Decodes echoed prompts that are token ids.

    Raises:
        InvalidRequestError: The request needs a tokenizer, and there is none.
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
        self._is_prompt_only = echoes_prompt_only(body)
        self._text_offsets = [0] * len(prompts) * body.num_choices
        self._begun: set[int] = set()
        # In a stream they arrive once, maybe before some of the choices begin.
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}

    def kept(self, output: RequestOutput) -> list[CompletionOutput]:
        """The completions of an output that become choices: with `best_of`, the best ones."""
        if self._body.num_drawn > self._body.num_choices:
            return best_completions(output.outputs, self._body.num_choices)
        return output.outputs

    def make_choice(
        self, prompt_idx: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice | None:
        """The choice of one completion in an output; None if there is nothing to send yet."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_idx] = output.prompt_logprobs
        index = choice_index(prompt_idx, completion, self._body.num_choices)
        is_new = has_new_content(completion, shows_token_ids=bool(self._body.return_token_ids))
        if is_new or (self._body.echo and index not in self._begun):
            return self._choice(index, prompt_idx, output, completion)
        return None

    def num_tokens(self, completion: CompletionOutput) -> int:
        """The tokens that the client asked for: 0 if only the prompt is scored."""
        return 0 if self._is_prompt_only else len(completion.token_ids)

    def _choice(
        self, index: int, prompt_idx: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        body = self._body
        is_first = index not in self._begun
        self._begun.add(index)
        has_prompt = bool(body.echo) and is_first
        text = "" if self._is_prompt_only else completion.text
        token_ids = [] if self._is_prompt_only else completion.token_ids
        positions = [] if self._is_prompt_only else completion.logprobs or []
        if has_prompt:
            text = self._prompt_text(prompt_idx, output) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*self._prompt_logprobs.get(prompt_idx, ()), *positions]
        logprobs = None
        # A beam search always has log-probabilities.
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
        if self._is_prompt_only and completion.finished:
            # The engine gives a reason for a token that the client did not ask for.
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
        # The token's text, even if the answer shows it as "token_id:17".
        return self._token_text(token_id) if position is None else position[token_id].decoded_token

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

"""Log-probabilities of prompts, as a step feature."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import Outputs, Wants
from paxkv.config.runner_config import RunnerConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH, pack_result, read_logprobs
from paxkv.runner.sampling.sampler import with_logprobs
from paxkv.runner.sampling.wide_logprobs import num_returned_logits, result_width
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import StepPart, StepVariant

# Number of tokens whose logits are computed at the same time. The logits of all tokens of a step
# would be the largest array of the engine.
_CHUNK_TOKENS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsVariant(StepVariant):
    """Computes, for each token of a prompt, the log-probabilities of the next token.

    Args:
        num_logits: Number of logits in the result for each token: the size of the vocabulary, or 0.
    """

    num_logits: int

    @property
    def row_width(self) -> int:
        """Words in a row of the result: the words of `pack_result`, then the logits' bits."""
        return RESULT_WIDTH + self.num_logits

    def fields(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        # For each token, the next token of the prompt; 0 if there is none.
        return {"next_ids": (num_tokens,)}

    def results(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (num_tokens, self.row_width)}

    def wants(self, wants: Wants) -> Wants:
        return dataclasses.replace(wants, hidden="all")

    def update(
        self,
        values: Mapping[str, jax.Array],
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> Mapping[str, jax.Array]:
        hidden, next_ids = outputs.hidden, part.read(part.fields["next_ids"])
        num_tokens = next_ids.shape[0]
        if num_tokens <= _CHUNK_TOKENS:
            return {"rows": part.write(values["rows"], self._rows(logits_of(hidden), next_ids))}

        def find_chunk(chunk_idx: jax.Array, rows: jax.Array) -> jax.Array:
            # The last chunk may overlap the chunk before it, so that it is full.
            start = jnp.minimum(chunk_idx * _CHUNK_TOKENS, num_tokens - _CHUNK_TOKENS)

            def of_chunk(array: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(array, start, _CHUNK_TOKENS)

            chunk_rows = self._rows(logits_of(of_chunk(hidden)), of_chunk(next_ids))
            return jax.lax.dynamic_update_slice_in_dim(rows, chunk_rows, start, axis=0)

        num_used = part.batch.query_start_loc[-1]
        num_chunks = (num_used + _CHUNK_TOKENS - 1) // _CHUNK_TOKENS
        rows = jnp.zeros((num_tokens, self.row_width), jnp.int32)
        rows = jax.lax.fori_loop(0, num_chunks, find_chunk, rows)
        return {"rows": part.write(values["rows"], rows)}

    def _rows(
        self,
        logits: jax.Array,  # f32[num_tokens, vocab]
        next_ids: jax.Array,  # i32[num_tokens]
    ) -> jax.Array:  # i32[num_tokens, row_width]
        """Packs the log-probabilities of the tokens that follow in the prompt."""
        rows = pack_result(with_logprobs(logits, next_ids))
        if not self.num_logits:
            return rows
        return jnp.concatenate([rows, jax.lax.bitcast_convert_type(logits, jnp.int32)], axis=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AskedPrompt:
    """A request that asked for log-probabilities of its prompt.

    Args:
        rows_np: i32[num_prompt_tokens - 1, result_width], a row for each token of the prompt except
            the first. The steps that compute the prompt fill it.
    """

    req_id: str
    num_logprobs: int
    rows_np: np.ndarray

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.rows_np) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PromptSpan:
    """Consecutive tokens of one prompt in a step.

    Args:
        places: Indices of the tokens in the step.
        next_ids_np: i32[num_tokens], for each token the next token of the prompt.
        rows_np: i32[num_tokens, result_width], the part of `_AskedPrompt.rows_np` to be written.
    """

    places: slice
    next_ids_np: np.ndarray
    rows_np: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PromptStep(FeatureStep):
    """The prompts of one step.

    Args:
        complete: Prompts whose requests sample their first token in this step.
    """

    variant: PromptLogprobsVariant | None
    spans: Sequence[_PromptSpan]
    complete: Sequence[_AskedPrompt]

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        for span in self.spans:
            views["next_ids"][span.places] = span.next_ids_np

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        for span in self.spans:
            width = span.rows_np.shape[1]
            span.rows_np[:] = results["rows"][span.places, :width]
        found = {
            prompt.req_id: [read_logprobs(row_np, prompt.num_logprobs) for row_np in prompt.rows_np]
            for prompt in self.complete
        }
        return dataclasses.replace(output, prompt_logprobs=output.prompt_logprobs | found)


class PromptLogprobs(StepFeature):
    """Computes the log-probabilities that `SamplingParams.prompt_logprobs` asks for.

    The steps that compute a prompt also compute its log-probabilities. They are returned together
    with the request's first token. If the request is preempted before that, later steps compute the
    prompt and its log-probabilities again.
    """

    def __init__(self, config: RunnerConfig, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._variant = PromptLogprobsVariant(num_logits=num_returned_logits(config, vocab_size))
        self._asked: dict[str, _AskedPrompt] = {}  # by request id; unfinished requests only

    def variants(self) -> tuple[StepVariant, ...]:
        return (self._variant,)

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self._asked.pop(req_id, None)
        for new_req in scheduler_output.scheduled_new_reqs:
            num_logprobs = new_req.sampling_params.prompt_logprobs
            if num_logprobs is not None:
                width = result_width(num_logprobs, self._vocab_size)
                dims = (len(new_req.prompt_token_ids) - 1, width)
                self._asked[new_req.req_id] = _AskedPrompt(
                    req_id=new_req.req_id,
                    num_logprobs=num_logprobs,
                    rows_np=np.zeros(dims, np.int32),
                )

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        if not self._asked:
            return None
        spans, complete = [], []
        for req_idx, req_id in enumerate(step.req_ids):
            prompt = self._asked.get(req_id)
            num_known = step.num_tokens_np[req_idx] + step.num_pending_np[req_idx]
            # A request with output tokens has all its log-probabilities.
            if prompt is None or num_known != prompt.num_prompt_tokens:
                continue
            num_scheduled = int(step.num_scheduled_np[req_idx])
            position = int(step.num_computed_np[req_idx])
            num_found = min(num_scheduled, prompt.num_prompt_tokens - 1 - position)
            if num_found > 0:
                token_ids_np = step.token_ids_np[step.rows_np[req_idx]]
                start = int(step.ends_np[req_idx]) - num_scheduled
                spans.append(
                    _PromptSpan(
                        places=slice(start, start + num_found),
                        next_ids_np=token_ids_np[position + 1 :][:num_found],
                        rows_np=prompt.rows_np[position:][:num_found],
                    )
                )
            if position + num_scheduled >= prompt.num_prompt_tokens:
                complete.append(prompt)
        if not spans and not complete:
            return None
        return _PromptStep(variant=self._variant if spans else None, spans=spans, complete=complete)

"""transformers' continuous batching: the manager behind `generate_batch`.

`generate_batch` gives all requests one output length, and these have their own: so the requests go
to its manager one by one, which is what `generate_batch` does with them.

On a CPU there are no block tables, graphs or overlapped steps: a step gathers the keys and values
of all its requests from the paged cache and attends with SDPA under one mask over all of them. So
it costs as the square of what its requests hold together, and transformers' defaults (all requests
at once, 8,192 tokens a step) take longer than fewer requests and shorter steps: `max_requests`.
"""

import math

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.compare_torch.transformers_model import load_transformers_model, logit_gap
from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload

# Smaller than transformers' 256, which takes as long and reserves more.
PAGE_SIZE = 32
# Of a step, where the number of requests is limited.
MAX_BATCH_TOKENS = 512
# Seconds without any finished request after which a run has failed.
_RESULT_TIMEOUT_S = 600.0


def load_engine(spec: EngineSpec, workload: Workload) -> "ContinuousBatching":
    num_blocks = sum(math.ceil(r.num_tokens / PAGE_SIZE) + 1 for r in workload.requests)
    return ContinuousBatching(load_transformers_model(spec), num_blocks)


class ContinuousBatching:
    """A manager for each run, so that no run finds another's prefixes.

    Args:
        num_blocks: Blocks of the cache, enough for the whole workload: nothing is ever evicted.
    """

    def __init__(self, model: PreTrainedModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks

    def prepare(self) -> None:
        pass

    def run(self, workload: Workload, max_requests: int | None) -> EngineOutput:
        """Runs all requests, at most `max_requests` at once; None is as transformers would."""
        is_limited = max_requests is not None
        settings = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=self._num_blocks,
            max_batch_tokens=MAX_BATCH_TOKENS if is_limited else None,
            max_requests_per_batch=max_requests if is_limited else len(workload.requests),
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        with self._model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, warmup=False
        ) as manager:
            for idx, request in enumerate(workload.requests):
                manager.add_request(
                    request.prompt_token_ids,
                    request_id=str(idx),
                    max_new_tokens=request.num_output_tokens,
                    eos_token_id=-1,
                )
            token_ids: dict[str, list[int]] = {}
            while len(token_ids) < len(workload.requests):
                result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
                if result is None or result.error is not None:
                    reason = "no result" if result is None else result.error
                    raise RuntimeError(f"transformers' continuous batching failed: {reason}")
                if result.is_finished():
                    token_ids[result.request_id] = result.generated_tokens
        return EngineOutput(token_ids=[token_ids[str(i)] for i in range(len(token_ids))])

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return logit_gap(self._model, token_ids, first, second)

    def close(self) -> None:
        pass

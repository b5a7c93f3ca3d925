"""transformers' continuous batching: the manager behind `generate_batch`.

`generate_batch` gives all requests one output length. The requests here have different lengths, so
they are passed to its manager one by one, as `generate_batch` itself does.

On a CPU, transformers uses no block tables, graphs or overlapped steps. A step gathers the keys and
values of all its requests from the paged cache, and attends with SDPA under one joint mask. So the
cost of a step grows with the square of the number of tokens that its requests hold. Fewer requests
and shorter steps (`max_requests`) are therefore faster than transformers' defaults, which are all
requests at once and 8,192 tokens per step.
"""

import math

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.compare_torch.transformers_model import load_transformers_model, logit_gap
from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload

# Smaller than transformers' 256, which is as fast and reserves more memory.
PAGE_SIZE = 32
# Largest number of tokens per step if the number of requests is limited.
MAX_BATCH_TOKENS = 512
# A run fails after this long without a finished request.
_RESULT_TIMEOUT_S = 600.0


def load_engine(spec: EngineSpec, workload: Workload) -> "ContinuousBatching":
    num_blocks = sum(math.ceil(r.num_tokens / PAGE_SIZE) + 1 for r in workload.requests)
    return ContinuousBatching(load_transformers_model(spec), num_blocks)


def run_requests(
    manager: ContinuousBatchingManager, workload: Workload, name: str = ""
) -> list[list[int]]:
    """Sends all requests at once; returns the new tokens of each, in the order of the workload.

    Args:
        name: Prefix of the request ids; runs with the same manager need different names.

    Raises:
        RuntimeError: transformers reports an error, or finishes no request for a long time.
    """
    req_ids = [f"{name}.{idx}" for idx in range(len(workload.requests))]
    for req_id, request in zip(req_ids, workload.requests, strict=True):
        manager.add_request(
            request.prompt_token_ids,
            request_id=req_id,
            max_new_tokens=request.num_output_tokens,
            eos_token_id=-1,
        )
    token_ids: dict[str, list[int]] = {}
    while len(token_ids) < len(req_ids):
        result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
        if result is None or result.error is not None:
            reason = "no result" if result is None else result.error
            raise RuntimeError(f"transformers' continuous batching failed: {reason}")
        if result.is_finished():
            token_ids[result.request_id] = result.generated_tokens
    return [token_ids[req_id] for req_id in req_ids]


class ContinuousBatching:
    """Runs workloads, each with a new manager, so that it finds no cached prefixes of other runs.

    Args:
        num_blocks: Blocks of the cache, enough for the whole workload, so none is evicted.
    """

    def __init__(self, model: PreTrainedModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks

    def prepare(self) -> None:
        pass

    def run(self, workload: Workload, max_requests: int | None) -> EngineOutput:
        """Runs all requests, at most `max_requests` at once; None keeps transformers' defaults."""
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
            return EngineOutput(token_ids=run_requests(manager, workload))

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return logit_gap(self._model, token_ids, first, second)

    def close(self) -> None:
        pass

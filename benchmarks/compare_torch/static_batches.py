"""transformers' `generate` on static batches.

Requests run in order of arrival in batches of `batch_size`, padded on the left to the longest
prompt of the batch. A batch runs until its longest output is complete; surplus tokens of shorter
outputs are dropped.
"""

import torch
from transformers import PreTrainedModel

from benchmarks.compare_torch.transformers_model import load_transformers_model, logit_gap
from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload, WorkloadRequest


def load_engine(spec: EngineSpec, workload: Workload) -> "StaticBatches":
    del workload
    return StaticBatches(load_transformers_model(spec))


class StaticBatches:
    """Keeps no state between batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prepare(self) -> None:
        pass

    def run(self, workload: Workload, batch_size: int) -> EngineOutput:
        token_ids = []
        for start in range(0, len(workload.requests), batch_size):
            token_ids += self._run_batch(workload.requests[start : start + batch_size])
        return EngineOutput(token_ids=token_ids)

    def _run_batch(self, requests: list[WorkloadRequest]) -> list[list[int]]:
        longest = max(len(request.prompt_token_ids) for request in requests)
        input_ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            num_pads = longest - len(request.prompt_token_ids)
            input_ids[row, num_pads:] = torch.tensor(request.prompt_token_ids)
            mask[row, num_pads:] = 1
        output_ids = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=max(request.num_output_tokens for request in requests),
            do_sample=False,
            pad_token_id=0,
        )
        new_ids = output_ids[:, longest:].tolist()
        return [
            row[: request.num_output_tokens] for row, request in zip(new_ids, requests, strict=True)
        ]

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return logit_gap(self._model, token_ids, first, second)

    def close(self) -> None:
        pass

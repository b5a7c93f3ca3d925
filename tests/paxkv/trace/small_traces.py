"""Small recorded runs: a header, requests, and a runner that always samples token 7."""

from pathlib import Path

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.entrypoints.build_scheduler import record_scheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.trace.header import TraceHeader
from paxkv.trace.recorder import TraceRecorder

TOKEN = 7


def make_header(*, num_blocks: int = 9, **scheduler: object) -> TraceHeader:
    """Blocks of 8 tokens; 16 tokens per step."""
    spec = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **scheduler}
    return TraceHeader(
        scheduler_config=SchedulerConfig(**settings),
        cache_config=CacheConfig(block_size=8, prefix_caching_seed="fixed"),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=(KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=spec),),
        ),
        max_model_len=64,
    )


def make_request(
    request_id: str, num_prompt_tokens: int = 4, *, max_tokens: int = 2, first_token: int = 100
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(range(first_token, first_token + num_prompt_tokens)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def answer(scheduler: Scheduler | TraceRecorder, output: SchedulerOutput) -> ModelRunnerOutput:
    """One token per request whose known tokens are computed; in a burst, one per decode step."""
    req_ids = list(output.num_scheduled_tokens)
    if output.num_decode_steps > 1:
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=[[TOKEN] * num for num in output.num_scheduled_tokens.values()],
            logprobs=[None] * len(req_ids),
        )
    requests = [scheduler.requests.get(req_id) for req_id in req_ids]
    return ModelRunnerOutput(
        req_ids=req_ids,
        sampled_token_ids=[
            [TOKEN] if r is not None and r.num_computed_tokens == r.num_tokens else []
            for r in requests
        ],
        logprobs=[None] * len(req_ids),
    )


def run_to_end(scheduler: Scheduler | TraceRecorder) -> None:
    while scheduler.has_unfinished_requests() or scheduler.has_finished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(scheduler, output))


def record_run(
    file: Path, *requests: EngineRequest, header: TraceHeader | None = None
) -> TraceRecorder:
    """Records requests that arrive together and run to their end."""
    scheduler = record_scheduler(header or make_header(), file)
    for request in requests:
        scheduler.add_request(request)
    run_to_end(scheduler)
    return scheduler

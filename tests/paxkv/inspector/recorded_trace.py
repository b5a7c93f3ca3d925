"""A small trace with prefix hits and a preemption."""

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec
from paxkv.entrypoints.build_scheduler import record_scheduler
from paxkv.trace.header import TraceHeader
from tests.paxkv.scheduler.stepping import FULL, FunctionRunner


def record(path, *, num_blocks=12, num_requests=6):
    """Returns the scheduler as it was at the end, and its number of steps and preemptions."""
    header = TraceHeader(
        scheduler_config=SchedulerConfig(max_num_seqs=3),
        cache_config=CacheConfig(prefix_caching_seed="test"),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=(KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=FULL),),
        ),
        max_model_len=64,
    )
    scheduler, runner = record_scheduler(header, path), FunctionRunner()
    for i in range(num_requests):
        scheduler.add_request(
            EngineRequest(
                request_id=f"r{i}",
                prompt_token_ids=[*range(8), i],
                sampling_params=SamplingParams(max_tokens=14),
            )
        )
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, runner.execute(output))
    scheduler.close()
    return scheduler

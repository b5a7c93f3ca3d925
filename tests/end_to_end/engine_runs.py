"""Runs requests through an engine core over a small runner, and collects their answers."""

import dataclasses

from paxkv.config.cache_config import CacheConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import AddRequest
from paxkv.engine.engine_core import EngineCore
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.structured_output.grammar_manager import GrammarManager
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one request got in all its outputs."""

    token_ids: list
    logprobs: list
    prompt_logprobs: list | None
    finish_reason: str
    stop_reason: int | str | None
    pooling_output: list | None
    num_draft_tokens: int = dataclasses.field(default=0, compare=False)
    num_accepted_tokens: int = dataclasses.field(default=0, compare=False)


def run(
    runner,
    requests,
    *,
    compiler=None,
    is_async=False,
    num_blocks=None,
    caching=False,
    max_drafts=0,
    use_eagle=False,
    max_decode_burst=1,
    arrivals=(),
    aborts=(),
):
    """The answers of all requests, and the number of preemptions.

    Args:
        arrivals: Steps after which the next request arrives; the others arrive before the first.
        aborts: Pairs of a step and a request that is then aborted.
    """
    grammars = None if compiler is None else GrammarManager(compiler)
    scheduler = (AsyncScheduler if is_async else Scheduler)(
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            full_sequence_must_fit=False,
        ),
        cache_config=CacheConfig(enable_prefix_caching=caching),
        kv_cache_config=dataclasses.replace(
            runner.kv_cache_config, num_blocks=num_blocks or runner.kv_cache_config.num_blocks
        ),
        max_model_len=MAX_MODEL_LEN,
        grammar_gate=grammars,
        num_lookahead_tokens=max_drafts,
        use_eagle=use_eagle,
    )
    core = EngineCore(
        scheduler,
        runner,
        grammars=grammars,
        max_steps_in_flight=2 if is_async else 1,
        max_decode_burst=max_decode_burst,
    )
    waiting, arrivals = list(requests), list(arrivals)
    while len(waiting) > len(arrivals):
        core.handle(AddRequest(request=waiting.pop(0)))
    outputs = {request.request_id: [] for request in requests}
    num_steps = 0
    while core.has_work or waiting:
        if waiting and (num_steps >= arrivals[0] or not core.has_work):
            arrivals.pop(0)
            core.handle(AddRequest(request=waiting.pop(0)))
        scheduler.finish_requests([req_id for step, req_id in aborts if step == num_steps])
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        scheduler.check_invariants()
        num_steps += 1
        assert num_steps < 10_000
    # Frees the blocks that are kept for forks.
    scheduler.finish_requests(outputs)
    stats = scheduler.make_stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    core.close()
    answers = {
        req_id: Answer(
            [token_id for output in of_one for token_id in output.new_token_ids],
            [entry for output in of_one for entry in output.logprobs or ()],
            next((o.prompt_logprobs for o in of_one if o.prompt_logprobs is not None), None),
            of_one[-1].finish_reason if of_one else None,
            of_one[-1].stop_reason if of_one else None,
            of_one[-1].pooling_output if of_one else None,
            sum(output.num_draft_tokens for output in of_one),
            sum(output.num_accepted_tokens for output in of_one),
        )
        for req_id, of_one in outputs.items()
    }
    return answers, stats.num_preemptions

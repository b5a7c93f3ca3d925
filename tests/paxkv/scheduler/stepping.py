"""A scheduler with small blocks, and a runner whose next token depends on all tokens before it."""

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.contracts.scheduler_output import KVConnectorOutput, ModelRunnerOutput
from paxkv.scheduler.scheduler import Scheduler

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def window(num_tokens):
    return SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=num_tokens
    )


def make_scheduler(
    scheduler_class=Scheduler,
    *,
    num_blocks=100,
    max_model_len=64,
    caching=True,
    specs=(FULL,),
    connector=None,
    grammar_gate=None,
    num_lookahead_tokens=0,
    use_eagle=False,
    bursts_change_logits=True,
    state_cache_share=0.5,
    state_save_interval=None,
    **config,
):
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer{i}",), kv_cache_spec=spec)
        for i, spec in enumerate(specs)
    )
    return scheduler_class(
        scheduler_config=SchedulerConfig(**({"max_num_seqs": 4} | config)),
        cache_config=CacheConfig(
            enable_prefix_caching=caching,
            prefix_caching_seed="test",
            state_cache_share=state_cache_share,
            state_save_interval=state_save_interval,
        ),
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups),
        max_model_len=max_model_len,
        connector=connector,
        grammar_gate=grammar_gate,
        num_lookahead_tokens=num_lookahead_tokens,
        use_eagle=use_eagle,
        bursts_change_logits=bursts_change_logits,
    )


def add(scheduler, request_id, prompt, *, max_tokens=20, params=None, **fields):
    """`prompt` is token ids, or a length, for tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + sum(request_id.encode())) + i for i in range(prompt)]
    scheduler.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, **(params or {})),
            **fields,
        )
    )
    return scheduler.requests[request_id]


def next_token(token_ids):
    return (sum(token_ids) * 31 + len(token_ids)) % 97


def continuation(prompt, num_tokens):
    """The tokens that a request must get, whatever else runs."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FunctionRunner:
    """Stores the tokens of each request itself, as a device does, and samples only from them.

    Args:
        knows_ends: Whether a burst stops for a request when a token ends it. If False, all its
            tokens are sampled.
    """

    def __init__(self, *, knows_ends=True):
        self.knows_ends = knows_ends
        self.token_ids = {}
        self.ending_token_ids = {}
        # Requests that a burst has ended. The scheduler may not know it yet.
        self.ended = set()

    def execute(self, output, *, drafts=None, transfers=None):
        """The answer to one step.

        Args:
            drafts: Drafts to propose, per request.
        """
        for new in output.scheduled_new_reqs:
            self.token_ids[new.req_id] = list(new.prompt_token_ids)
            self.ending_token_ids[new.req_id] = new.ending_token_ids
            self.ended.discard(new.req_id)
        cached = output.scheduled_cached_reqs
        for req_id, token_ids in cached.all_token_ids.items():
            self.token_ids[req_id] = list(token_ids)
            self.ended.discard(req_id)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            row = self.token_ids[req_id]
            if req_id in self.ended:
                sampled[req_id] = []
                continue
            if output.num_decode_steps > 1:
                assert num_tokens <= output.num_decode_steps
                assert computed[req_id] == len(row) - 1
                sampled[req_id] = self.decode(req_id, row, num_tokens)
                continue
            proposed = output.scheduled_spec_decode_tokens.get(req_id, [])
            assert computed[req_id] + num_tokens <= len(row) + len(proposed)
            sampled[req_id] = []
            if computed[req_id] + num_tokens >= len(row):
                sampled[req_id] = self.verify(row, proposed)
        return answer(sampled, drafts=drafts, transfers=transfers)

    def decode(self, req_id, row, num_tokens):
        """Tokens of a burst, up to the one that ends the request."""
        sampled = []
        while len(sampled) < num_tokens and req_id not in self.ended:
            sampled.append(next_token(row))
            row.append(sampled[-1])
            if self.knows_ends and sampled[-1] in self.ending_token_ids[req_id]:
                self.ended.add(req_id)
        return sampled

    def verify(self, row, proposed):
        """The right drafts, and the token after them."""
        sampled = [next_token(row)]
        for draft in proposed:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(row + sampled))
        row += sampled
        return sampled


def answer(sampled, *, drafts=None, transfers=None):
    return ModelRunnerOutput(
        req_ids=list(sampled),
        sampled_token_ids=list(sampled.values()),
        logprobs=[None] * len(sampled),
        draft_token_ids=drafts or {},
        kv_connector_output=None if transfers is None else KVConnectorOutput(**transfers),
    )


def check_progress(scheduler, output):
    """Checks that a token was scheduled if a request could run. Call it right after `schedule`."""
    assert output.num_scheduled_tokens or not scheduler.requests or scheduler.may_schedule_nothing()


def step(scheduler, runner, max_decode_steps=1, **answers):
    """Runs one step, with checks before and after its tokens are returned."""
    output = scheduler.schedule(max_decode_steps)
    scheduler.check_invariants()
    check_progress(scheduler, output)
    scheduler.update_from_output(output, runner.execute(output, **answers))
    scheduler.check_invariants()
    return output


def counts(output):
    return output.num_scheduled_tokens


def ids(queue):
    return [request.request_id for request in queue]

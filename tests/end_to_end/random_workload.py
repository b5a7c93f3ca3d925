"""A random workload for a scheduler that has everything which makes its decisions hard.

Shared prefixes, priorities, salts, adapters, forks, images, grammars, drafts, loads and saves of a
KV connector, aborts, resets of the prefix cache, steps in flight together, two kinds of attention
over one pool, and a pool so small that requests are preempted.
"""

import random
from collections import deque
from collections.abc import Callable

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig, SchedulerPolicy
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.scheduler.scheduler import Scheduler
from paxkv.trace.header import TraceHeader
from paxkv.trace.recorder import TraceRecorder
from tests.end_to_end.random_outside import RandomConnector, RandomGrammarGate

BLOCK_SIZE = 8
MAX_MODEL_LEN = 320
VOCAB_SIZE = 1000
EOS_TOKEN_ID = 0
# Unfinished requests that the workload keeps up, by adding new ones.
NUM_UNFINISHED = 48


def make_header(*, policy: SchedulerPolicy = "priority", is_async: bool = False) -> TraceHeader:
    """Two groups, full and sliding, over a pool that holds a few long requests at once."""
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    full = FullAttentionSpec(**sizes)
    sliding = SlidingWindowSpec(**sizes, sliding_window=40)
    return TraceHeader(
        scheduler_config=SchedulerConfig(
            max_num_seqs=24,
            max_num_batched_tokens=128,
            long_prefill_token_threshold=64,
            policy=policy,
            # The storm of preemptions that it prevents is what is wanted here.
            full_sequence_must_fit=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, prefix_caching_seed="workload"),
        kv_cache_config=KVCacheConfig(
            num_blocks=260,
            kv_cache_groups=(
                KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=full),
                KVCacheGroupSpec(layer_names=("layers.1",), kv_cache_spec=sliding),
            ),
        ),
        max_model_len=MAX_MODEL_LEN,
        is_async=is_async,
    )


class RandomWorkload:
    """Drives a scheduler through a number of requests, and answers for its runner.

    The same seed and the same decisions give the same workload.

    Args:
        make_scheduler: Given the connector and the grammar gate.
    """

    def __init__(
        self,
        make_scheduler: Callable[[RandomConnector, RandomGrammarGate], Scheduler | TraceRecorder],
        *,
        num_requests: int,
        seed: int,
    ) -> None:
        self._rng = random.Random(seed)
        self._connector = RandomConnector(random.Random(seed + 1))
        self.scheduler = make_scheduler(self._connector, RandomGrammarGate(random.Random(seed + 2)))
        self._num_left = num_requests
        self._num_added = 0
        self._prefixes = [self._tokens(self._rng.randint(1, 120)) for _ in range(12)]
        # Steps whose tokens have not come back, with the requests that get some.
        self._in_flight: deque[tuple[SchedulerOutput, frozenset[str]]] = deque()
        self.num_steps = 0

    @property
    def is_done(self) -> bool:
        has_requests = self._num_left > 0 or self.scheduler.has_unfinished_requests()
        return not has_requests and not self._connector.is_busy

    def run(self) -> None:
        """Until every request and every transfer has ended."""
        while not self.is_done:
            self.step()
        # The runner learns of the last finished requests.
        self.step()
        self._finish_steps(max_in_flight=0)

    def step(self) -> None:
        """Arrivals and aborts, one step, and aborts while it runs."""
        self._add_requests()
        self._disturb()
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._sampled_requests(output)))
        self._disturb()
        self._finish_steps(max_in_flight=self._rng.choice((0, 0, 0, 1)))
        self.num_steps += 1

    def _add_requests(self) -> None:
        num_missing = NUM_UNFINISHED - self.scheduler.num_unfinished_requests()
        for _ in range(min(num_missing, self._num_left, self._rng.randint(0, 4))):
            self._num_left -= 1
            self._num_added += 1
            self.scheduler.add_request(self._make_request(f"r{self._num_added}"))

    def _disturb(self) -> None:
        rng = self._rng
        if rng.random() < 0.03 and self.scheduler.requests:
            req_ids = rng.sample(sorted(self.scheduler.requests), 1)
            self.scheduler.finish_requests(req_ids, rng.choice(("abort", "stop")))
        if rng.random() < 0.005:
            self.scheduler.reset_prefix_cache(rng.random() < 0.5)

    def _make_request(self, request_id: str) -> EngineRequest:
        rng = self._rng
        fork_from = None
        prompt = rng.choice(self._prefixes) + self._tokens(rng.randint(0, 60))
        if rng.random() < 0.15 and self.scheduler.requests:
            fork_from = rng.choice(sorted(self.scheduler.requests))
            shared = self.scheduler.requests[fork_from].all_token_ids
            prompt = shared[: rng.randint(1, len(shared))] + self._tokens(rng.randint(0, 8))
        prompt = prompt[: MAX_MODEL_LEN - 64]
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=rng.randint(1, 40),
                temperature=0.0,
                skip_reading_prefix_cache=rng.random() < 0.03,
            ),
            eos_token_ids=(EOS_TOKEN_ID,),
            arrival_time=float(self._num_added),
            priority=rng.choice((0, 0, 0, 1, 2)),
            cache_salt="tenant" if rng.random() < 0.1 else None,
            lora_name="adapter" if rng.random() < 0.1 else None,
            mm_features=self._features(len(prompt)),
            fork_from=fork_from,
            keep_blocks=rng.random() < 0.02,
            needs_grammar=rng.random() < 0.05,
        )

    def _features(self, num_prompt_tokens: int) -> tuple[MultiModalFeature, ...]:
        """An image in the prompt of one request in ten, from a few that come again and again."""
        if num_prompt_tokens < 24 or self._rng.random() > 0.1:
            return ()
        identifier = f"image{self._rng.randrange(8)}"
        offset = self._rng.randint(0, num_prompt_tokens - 16)
        return (MultiModalFeature(identifier=identifier, offset=offset, length=16),)

    def _sampled_requests(self, output: SchedulerOutput) -> frozenset[str]:
        """Requests whose last known token is computed in a step that has just been decided."""
        cached = output.scheduled_cached_reqs
        num_computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        num_outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        num_computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        sampled: set[str] = set()
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            num_known = self.scheduler.requests[req_id].num_prompt_tokens
            num_known += num_outputs.get(req_id, 0)
            if num_computed[req_id] + num_tokens - num_drafts >= num_known:
                sampled.add(req_id)
        return frozenset(sampled)

    def _finish_steps(self, max_in_flight: int) -> None:
        """Returns tokens, oldest step first, until at most this many steps are in flight."""
        while len(self._in_flight) > max_in_flight:
            output, sampled = self._in_flight.popleft()
            self.scheduler.update_from_output(output, self._answer(output, sampled))

    def _answer(self, output: SchedulerOutput, sampled: frozenset[str]) -> ModelRunnerOutput:
        """A token and perhaps accepted drafts for each of `sampled`, and drafts for some."""
        rng = self._rng
        req_ids = list(output.num_scheduled_tokens)
        token_ids: list[list[int]] = []
        drafts: dict[str, list[int]] = {}
        for req_id in req_ids:
            num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            num_tokens = 1 + rng.randint(0, num_drafts) if req_id in sampled else 0
            token_ids.append(self._tokens(num_tokens))
            if rng.random() < 0.2:
                drafts[req_id] = self._tokens(rng.randint(1, 3))
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=token_ids,
            logprobs=[None] * len(req_ids),
            draft_token_ids=drafts,
            kv_connector_output=self._connector.take_output(),
        )

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

"""Schedules requests for a `ModelRunner` as a test asks, and keeps their tokens and blocks."""

import random
from collections import Counter

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.runner import ModelRunner


class RunnerDriver:
    """Requests with their tokens and blocks. Blocks are allocated in a shuffled order.

    A group with a sliding window frees blocks as soon as they leave the window, and they are the
    first to be allocated again. So a read or write at their old position changes an answer.
    """

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self.block_sizes = [spec.block_size for spec in specs]
        self.windows = [getattr(spec, "sliding_window", None) for spec in specs]
        self.free_blocks = list(range(1, runner.kv_cache_config.num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.num_holders: Counter[int] = Counter()
        self.params: dict[str, SamplingParams] = {}
        self.new_req_fields: dict[str, dict[str, object]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # per group; 0 where one was given back
        self.known: set[str] = set()
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.newly_preempted: set[str] = set()

    def add(
        self, req_id: str, prompt: list[int], params: SamplingParams, **new_req_fields: object
    ) -> None:
        """Args: new_req_fields: More fields of its `NewRequestData`."""
        self.params[req_id] = params
        self.new_req_fields[req_id] = new_req_fields
        self.tokens[req_id] = list(prompt)
        self.num_prompt_tokens[req_id] = len(prompt)
        self.num_computed[req_id] = 0
        self.blocks[req_id] = [[] for _ in self.windows]

    def fork(self, source: str, req_id: str) -> list[BlockCopy]:
        """Adds a request with another's tokens, its full blocks, and copies of its last ones."""
        self.add(req_id, self.tokens[source], self.params[source])
        self.num_computed[req_id] = len(self.tokens[source]) - 1
        copies = []
        for own, blocks in zip(self.blocks[req_id], self.blocks[source], strict=True):
            own += blocks[:-1]
            self.num_holders.update(own)
            own.append(self.allocate_block())
            copies.append(BlockCopy(source_block_id=blocks[-1], target_block_id=own[-1]))
        return copies

    def output_of(self, req_id: str) -> list[int]:
        return self.tokens[req_id][self.num_prompt_tokens[req_id] :]

    def preempt(self, req_id: str) -> None:
        self._free_all(self.blocks[req_id])
        self.blocks[req_id] = [[] for _ in self.windows]
        self.num_computed[req_id] = 0
        self.preempted.add(req_id)
        self.newly_preempted.add(req_id)

    def finish(self, req_id: str) -> None:
        self._free_all(self.blocks.pop(req_id))
        self.finished.add(req_id)
        self.known.discard(req_id)
        self.preempted.discard(req_id)

    def num_left(self, req_id: str) -> int:
        """Tokens to compute until the request's next token is drawn."""
        return len(self.tokens[req_id]) - self.num_computed[req_id]

    def schedule(self, num_scheduled: dict[str, int], num_decode_steps: int = 1) -> SchedulerOutput:
        """Decides a step that computes these numbers of tokens, and updates the requests."""
        new_reqs, cached_ids, new_blocks, num_computed = [], [], [], []
        resumed = frozenset(self.preempted & set(num_scheduled))
        for req_id, num_tokens in num_scheduled.items():
            computed = self.num_computed[req_id]
            added = self._hold_blocks(req_id, computed, num_tokens)
            if req_id in self.known:
                cached_ids.append(req_id)
                new_blocks.append(added if any(added) else None)
                num_computed.append(computed)
            else:
                self.known.add(req_id)
                new_reqs.append(
                    NewRequestData(
                        req_id=req_id,
                        prompt_token_ids=self.tokens[req_id],
                        sampling_params=self.params[req_id],
                        block_ids=tuple(map(list, self.blocks[req_id])),
                        num_computed_tokens=computed,
                        **self.new_req_fields[req_id],
                    )
                )
            self.num_computed[req_id] += num_tokens
        output = SchedulerOutput(
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached_ids,
                resumed_req_ids=resumed,
                new_block_ids=new_blocks,
                num_computed_tokens=num_computed,
                num_output_tokens=[len(self.output_of(r)) for r in cached_ids],
                all_token_ids={r: list(self.tokens[r]) for r in resumed},
            ),
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            preempted_req_ids=frozenset(self.newly_preempted & self.known),
            finished_req_ids=frozenset(self.finished),
            num_decode_steps=num_decode_steps,
        )
        self.preempted -= resumed
        self.newly_preempted.clear()
        self.finished.clear()
        return output

    def _hold_blocks(self, req_id: str, computed: int, num_tokens: int) -> tuple[list[int], ...]:
        """Frees blocks that left the window, and allocates the missing ones, per group."""
        added = []
        groups = zip(self.blocks[req_id], self.windows, self.block_sizes, strict=True)
        for blocks, window, block_size in groups:
            num_passed = max(computed - window + 1, 0) // block_size if window else 0
            self._free_all([blocks[:num_passed]])
            blocks[:num_passed] = [0] * len(blocks[:num_passed])
            num_missing = -(-(computed + num_tokens) // block_size) - len(blocks)
            added.append([self.allocate_block() for _ in range(num_missing)])
            blocks += added[-1]
        return tuple(added)

    def allocate_block(self) -> int:
        block = self.free_blocks.pop()
        self.num_holders[block] = 1
        return block

    def _free_all(self, blocks_per_group: list[list[int]]) -> None:
        for block in (block for blocks in blocks_per_group for block in blocks if block):
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self.free_blocks.append(block)

    def step(self, num_scheduled: dict[str, int], num_decode_steps: int = 1) -> ModelRunnerOutput:
        """Schedules and computes a step, and appends its tokens."""
        decision = self.schedule(num_scheduled, num_decode_steps)
        output = self.runner.execute_model(decision).sample_tokens()
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.tokens[req_id] += token_ids
        return output

    def run_alone(self, req_id: str, num_tokens: int, max_chunk: int) -> list[int]:
        """Prompt in as few steps as possible, then one token per step; returns the output."""
        while len(self.output_of(req_id)) < num_tokens:
            self.step({req_id: min(self.num_left(req_id), max_chunk)})
        return self.output_of(req_id)

    def finish_all(self) -> None:
        """Ends every request, so that the runner can serve another test."""
        for req_id in list(self.blocks):
            self.finish(req_id)
        self.step({})

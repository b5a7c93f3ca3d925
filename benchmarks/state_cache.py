"""Prefix hits of models with states, by the share of memory that saved states may take.

    python -m benchmarks.state_cache

Runs the engine's scheduler and block pool without a device, with the slots of one model and a pool
that is too small for everything that the workload would share. Tokens are drawn on the host, so the
figures are exact. Workloads:

    chat      open conversations with system prompts of 200 to 1,000 tokens, which four share. Each
              request is the next turn of a random one: 20 to 200 new tokens, an answer of 20 to
              300, after which a conversation goes on with probability 0.85
    prefix    documents of 500 to 4,000 tokens, each before a question of 10 to 100 tokens with an
              answer of 20 to 100. Few documents are asked often (Zipf's law)
    both      one half of the requests from each

The figure is the share of the prompts' tokens that were found in the prefix cache, in percent. The
first quarter of the requests fills the cache and does not count.
"""

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Sequence

from benchmarks.command_line import (
    natural_float,
    output_file,
    positive_int,
    run_benchmark,
    seed_number,
)
from benchmarks.host import Slots, parse_slots
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 16_384
VOCAB_SIZE = 32_000
NUM_SYSTEM_PROMPTS = 15
NUM_DOCUMENTS = 200
WORKLOADS = ("chat", "prefix", "both")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request of a workload. A conversation continues with its answer."""

    prompt: list[int]
    num_leading_tokens: int
    num_answered: int
    conversation: "Conversation | None" = None


@dataclasses.dataclass(slots=True)
class Conversation:
    token_ids: list[int]
    num_leading_tokens: int


class Workload:
    """Draws requests; see the module. Requests of one conversation never run at the same time."""

    def __init__(self, name: str, num_open: int, seed: int) -> None:
        self._name = name
        self._rng = random.Random(seed)
        self._systems = [self._tokens(200, 1000) for _ in range(NUM_SYSTEM_PROMPTS)]
        self._documents = [self._tokens(500, 4000) for _ in range(NUM_DOCUMENTS)]
        self._weights = [1 / rank for rank in range(1, NUM_DOCUMENTS + 1)]
        self._open = [self._start() for _ in range(num_open)]

    def draw(self) -> Turn:
        is_chat = self._name == "chat" or (self._name == "both" and self._rng.random() < 0.5)
        return self._draw_turn() if is_chat and self._open else self._draw_question()

    def end(self, turn: Turn, answer: list[int]) -> None:
        """Continues a conversation after an answer, or starts another one."""
        conversation = turn.conversation
        if conversation is None:
            return
        conversation.token_ids = turn.prompt + answer
        is_long = len(conversation.token_ids) > MAX_MODEL_LEN - 1000
        if is_long or self._rng.random() > 0.85:
            conversation = self._start()
        self._open.append(conversation)

    def _start(self) -> Conversation:
        system = self._rng.choice(self._systems)
        return Conversation(list(system), len(system))

    def _draw_turn(self) -> Turn:
        conversation = self._open.pop(self._rng.randrange(len(self._open)))
        return Turn(
            prompt=conversation.token_ids + self._tokens(20, 200),
            num_leading_tokens=conversation.num_leading_tokens,
            num_answered=self._rng.randint(20, 300),
            conversation=conversation,
        )

    def _draw_question(self) -> Turn:
        (document,) = self._rng.choices(self._documents, self._weights)
        return Turn(
            prompt=document + self._tokens(10, 100),
            num_leading_tokens=0,
            num_answered=self._rng.randint(20, 100),
        )

    def _tokens(self, least: int, most: int) -> list[int]:
        return self._rng.choices(range(VOCAB_SIZE), k=self._rng.randint(least, most))


def make_scheduler(slots: tuple[int, int], num_blocks: int, share: float, most: int) -> Scheduler:
    """A scheduler for a model with one group of attention and one of states.

    Args:
        slots: Parts of a slot, and blocks of each part.
        most: Largest number of running requests.
    """
    num_parts, blocks_per_state = slots
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    page_bytes = attention.page_size_bytes
    states = MambaSpec(
        block_size=BLOCK_SIZE,
        page_bytes=page_bytes,
        state_bytes=blocks_per_state * page_bytes,
        blocks_per_state=blocks_per_state,
        num_parts=num_parts,
    )
    return Scheduler(
        scheduler_config=SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=8192),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, state_cache_share=share),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_groups=(
                KVCacheGroupSpec(layer_names=("attention",), kv_cache_spec=attention),
                KVCacheGroupSpec(layer_names=("states",), kv_cache_spec=states),
            ),
        ),
        max_model_len=MAX_MODEL_LEN,
    )


def answer(output: SchedulerOutput, scheduler: Scheduler, rng: random.Random) -> ModelRunnerOutput:
    """As many random tokens for each request as the step or burst samples."""
    sampled: list[list[int]] = []
    for req_id, num_tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[req_id]
        is_drawn = request.num_computed_tokens >= request.num_tokens
        num_drawn = num_tokens if output.num_decode_steps > 1 else 1
        sampled.append(rng.choices(range(VOCAB_SIZE), k=num_drawn) if is_drawn else [])
    return ModelRunnerOutput(
        req_ids=list(output.num_scheduled_tokens),
        sampled_token_ids=sampled,
        logprobs=[None] * len(sampled),
    )


def measure(
    workload: Workload, scheduler: Scheduler, *, num_requests: int, at_once: int, seed: int
) -> float:
    """Share of the prompts' tokens that were found in the prefix cache, in percent."""
    rng = random.Random(seed)
    running: dict[str, Turn] = {}
    answers: dict[str, list[int]] = {}
    num_sent = num_tokens = num_found = 0
    while num_sent < num_requests or running:
        while num_sent < num_requests and len(running) < at_once:
            turn, req_id = workload.draw(), str(num_sent)
            num_sent += 1
            running[req_id], answers[req_id] = turn, []
            scheduler.add_request(
                EngineRequest(
                    request_id=req_id,
                    prompt_token_ids=turn.prompt,
                    sampling_params=SamplingParams(max_tokens=turn.num_answered, ignore_eos=True),
                    num_leading_tokens=turn.num_leading_tokens,
                )
            )
        output = scheduler.schedule(max_decode_steps=8)
        for done in scheduler.update_from_output(output, answer(output, scheduler, rng)):
            answers[done.request_id] += done.new_token_ids
            if done.finish_reason is None:
                continue
            turn = running.pop(done.request_id)
            workload.end(turn, answers.pop(done.request_id))
            if int(done.request_id) >= num_requests // 4:
                num_tokens += len(turn.prompt)
                num_found += done.num_cached_tokens
    scheduler.check_invariants()
    return 100 * num_found / num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--shares", type=natural_float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
    )
    parser.add_argument(
        "--slots",
        type=parse_slots,
        default=(3, 67),
        metavar="PARTSxBLOCKS",
        help="slots of states; Qwen3-Next-80B has 3x67",
    )
    parser.add_argument("--num-blocks", type=positive_int, default=40_000, metavar="N")
    parser.add_argument("--num-open", type=positive_int, default=60, metavar="N")
    parser.add_argument("--at-once", type=positive_int, default=16, metavar="N")
    parser.add_argument("--num-requests", type=positive_int, default=800, metavar="N")
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0, 1], metavar="N")
    out = str(RESULTS_FOLDER / "state_cache.jsonl")
    parser.add_argument("--out", type=output_file, default=out)
    arguments = parser.parse_args(argv)
    slots: Slots = arguments.slots
    if slots is None:
        parser.error("--slots none has no states; give parts x blocks, as in 3x67")
    if arguments.num_open < 2 * arguments.at_once:
        parser.error("--num-open must be at least twice --at-once: one request per conversation")
    rows = []
    for name in arguments.workloads:
        for share in arguments.shares:
            values = [
                measure(
                    Workload(name, arguments.num_open, seed),
                    make_scheduler(slots, arguments.num_blocks, share, arguments.at_once),
                    num_requests=arguments.num_requests,
                    at_once=arguments.at_once,
                    seed=seed,
                )
                for seed in arguments.seeds
            ]
            rows.append(
                ResultRow(
                    benchmark="benchmarks.state_cache",
                    case=f"workload={name} share={share:g} slots={slots[0]}x{slots[1]} "
                    f"num_blocks={arguments.num_blocks} num_open={arguments.num_open}",
                    metric="found_percent",
                    values=values,
                    device=processor_name(),
                )
            )
    append_rows(rows, arguments.out)
    print(_table(rows, arguments.workloads, arguments.shares))
    return 0


def _table(rows: Sequence[ResultRow], workloads: Sequence[str], shares: Sequence[float]) -> str:
    medians = [statistics.median(row.values) for row in rows]
    lines = [
        [name, *(f"{medians[i * len(shares) + k]:.1f}" for k in range(len(shares)))]
        for i, name in enumerate(workloads)
    ]
    return markdown_table(["found, %; share", *(f"{share:g}" for share in shares)], lines)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))

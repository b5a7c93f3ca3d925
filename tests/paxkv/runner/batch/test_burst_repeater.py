"""A repeated burst equals the burst that would be built anew."""

import itertools
import random

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.batch_builder import BatchBuilder
from paxkv.runner.batch.burst_repeater import BurstRepeater
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.step_buckets import StepBuckets

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZES = 4, 96, (8, 4)
TABLES = tuple(
    TableShape(num_groups=1, max_blocks_per_req=MAX_MODEL_LEN // size, block_size=size)
    for size in BLOCK_SIZES
)
SLOT_BLOCKS = 4  # two parts of two blocks
TABLES += (TableShape(num_groups=2, max_blocks_per_req=2, block_size=8, is_state=True),)


class Traffic:
    """Requests in steady decode. No two have the same tokens or blocks."""

    def __init__(self):
        self.batch = InputBatch.create(
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            tables=TABLES,
            num_blocks=5000,
            vocab_size=100,
            seed=0,
        )
        buckets = StepBuckets(
            max_num_batched_tokens=64,
            max_num_seqs=MAX_NUM_SEQS,
            max_decode_burst=6,
            tables=TABLES,
            max_model_len=MAX_MODEL_LEN,
        )
        self.builder = BatchBuilder(
            buckets=buckets, input_batch=self.batch, max_num_seqs=MAX_NUM_SEQS
        )
        self.num_computed = {}
        self.num_blocks = {}
        self.next_block = 1
        # Tokens of the last step on the device, and steps whose tokens were not fetched.
        self.prev_tokens_np = np.zeros(MAX_NUM_SEQS, np.int32)
        self.unfetched = []

    def allocate_blocks(self, req_id, num_tokens):
        """Allocates the blocks that `num_tokens` tokens still need, per group."""
        taken = []
        for group, block_size in enumerate(BLOCK_SIZES):
            num_new = -(-num_tokens // block_size) - self.num_blocks[req_id][group]
            taken.append(list(range(self.next_block, self.next_block + num_new)))
            self.next_block += num_new
            self.num_blocks[req_id][group] += num_new
        return (*taken, [])

    def allocate_slot(self):
        self.next_block += SLOT_BLOCKS
        return list(range(self.next_block - SLOT_BLOCKS, self.next_block))

    def decide(
        self, req_ids, num_steps=1, *, new=None, finished=(), without_blocks=False, moving=()
    ):
        """Schedules a burst of all; `new` maps ids to prompts, whose last token is computed.

        The requests of `moving` get another slot, which they write from the last step on.
        """
        new_reqs, block_ids = [], []
        for req_id, prompt in (new or {}).items():
            self.num_computed[req_id] = len(prompt) - 1
            self.num_blocks[req_id] = [0] * len(BLOCK_SIZES)
            new_reqs.append(
                NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(temperature=0.5, ignore_eos=True),
                    block_ids=(
                        *self.allocate_blocks(req_id, len(prompt) - 1 + num_steps)[:-1],
                        self.allocate_slot(),
                    ),
                    num_computed_tokens=len(prompt) - 1,
                )
            )
        known = [req_id for req_id in req_ids if req_id not in (new or {})]
        for req_id in known:
            if without_blocks:
                block_ids.append(None)
            else:
                taken = self.allocate_blocks(req_id, self.num_computed[req_id] + num_steps)
                if req_id in moving:
                    taken = (*taken[:-1], self.allocate_slot())
                block_ids.append(taken if any(taken) else None)
        output = SchedulerOutput(
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=known,
                resumed_req_ids=frozenset(),
                new_block_ids=block_ids,
                num_computed_tokens=[self.num_computed[req_id] for req_id in known],
                num_output_tokens=[0] * len(known),
                all_token_ids={},
            ),
            num_scheduled_tokens=dict.fromkeys([*known, *(new or {})], num_steps),
            total_num_scheduled_tokens=num_steps * len(req_ids),
            preempted_req_ids=frozenset(),
            finished_req_ids=frozenset(finished),
            num_decode_steps=num_steps,
            slot_switches={req_id: self.num_computed[req_id] + num_steps - 1 for req_id in moving},
        )
        for req_id in req_ids:
            self.num_computed[req_id] += num_steps
        self.batch.update(output)
        return output

    def build(self, output):
        """Returns the step, its fields, and the fields of the same step built anew."""
        built = self.builder.build(output)
        anew = self.builder._build_anew(
            output, built.req_ids, self.batch.rows_of(list(output.num_scheduled_tokens))
        )
        return built, self.contents(built), self.contents(anew)

    def contents(self, built):
        fields = PackedLayout(built.shape).views(built.packed_np)
        source_np = fields.pop("token_source")
        on_device_np = self.prev_tokens_np[np.minimum(source_np, MAX_NUM_SEQS - 1)]
        token_ids_np = np.where(source_np < MAX_NUM_SEQS, on_device_np, fields["token_ids"])
        # Rows without a request may differ.
        fields["token_ids"] = token_ids_np[: len(built.req_ids)]
        assert built.num_drawn_np.tolist() == [built.num_drawn_of_each] * len(built.req_ids)
        return {name: field_np.tolist() for name, field_np in fields.items()}

    def draw(self, built):
        """Draws tokens on the device. All tokens of all steps differ."""
        self.batch.record_drawn(built.rows_np, built.num_drawn_np)
        num_steps, num_reqs = built.num_drawn_of_each, len(built.req_ids)
        drawn_np = np.arange(num_steps * num_reqs, dtype=np.int32).reshape(num_steps, num_reqs)
        drawn_np += int(self.prev_tokens_np.max()) + 1
        self.prev_tokens_np[:num_reqs] = drawn_np[-1]
        self.unfetched.append((built, drawn_np))

    def fetch_tokens(self):
        for built, drawn_np in self.unfetched:
            if built.num_drawn_of_each == 1:
                self.batch.append_one_each(built.rows_np, drawn_np[0])
            else:
                self.batch.append_tokens(built.rows_np, drawn_np, built.num_drawn_np)
        self.unfetched.clear()


def prompts(*lengths):
    """Prompts whose tokens identify their request."""
    return {f"r{idx}": [10 + idx] * length for idx, length in enumerate(lengths)}


@pytest.mark.parametrize("num_steps", [1, 6])
def test_repeated_bursts_equal_newly_built_ones(num_steps):
    """The bursts cross ends of blocks; the tokens before them are on the host or the device."""
    rng = random.Random(0)
    traffic = Traffic()
    output = traffic.decide(["r0", "r1", "r2"], num_steps, new=prompts(3, 8, 13))
    repeaters = set()
    for _ in range(10):
        built, got, wanted = traffic.build(output)
        assert got == wanted
        repeaters.add(traffic.builder._burst_repeater)
        traffic.draw(built)
        if rng.random() < 0.5:
            traffic.fetch_tokens()
        output = traffic.decide(["r0", "r1", "r2"], num_steps)
    assert len(repeaters) == 1


def test_repeated_bursts_have_the_slots_of_newly_built_ones():
    traffic = Traffic()
    output = traffic.decide(["r0", "r1", "r2"], 6, new=prompts(3, 8, 13))
    slots = []
    for moving in [(), ("r1",), (), ("r0", "r2"), ("r2",), ()]:
        built, got, wanted = traffic.build(output)
        assert got == wanted
        slots.append(got["block_tables_2"])
        traffic.draw(built)
        output = traffic.decide(["r0", "r1", "r2"], 6, moving=moving)
    assert isinstance(traffic.builder._burst_repeater, BurstRepeater)
    # What a burst writes is what the next one reads.
    for (_, written), (read, _) in itertools.pairwise(slots):
        assert read == written
    assert sum(read != written for read, written in slots) == 3


def test_burst_of_other_rows_or_lengths_is_built_anew():
    traffic = Traffic()
    steps = [
        traffic.decide(["r0", "r1"], new=prompts(3, 8)),
        lambda: traffic.decide(["r0", "r1"]),
        lambda: traffic.decide(["r0", "r1"], 2),
        lambda: traffic.decide(["r0", "r1", "r2"], 2, new={"r2": [7, 7]}),
        # A new request gets the row of a finished one.
        lambda: traffic.decide(["r0", "r3", "r2"], 2, new={"r3": [8] * 9}, finished=["r1"]),
        lambda: traffic.decide(["r2", "r3", "r0"], 2),
        lambda: traffic.decide(["r2", "r0"], 2),
        lambda: traffic.decide(["r2", "r0"], 2),
    ]
    for step in steps:
        built, got, wanted = traffic.build(step() if callable(step) else step)
        assert got == wanted
        traffic.draw(built)


def test_burst_is_built_anew_after_a_request_lost_tokens():
    traffic = Traffic()
    for step_idx in range(3):
        output = traffic.decide(["r0", "r1"], new=None if step_idx else prompts(3, 8))
        built, _, _ = traffic.build(output)
        traffic.draw(built)
    traffic.fetch_tokens()
    traffic.num_computed["r1"] -= 2
    output = traffic.decide(["r0", "r1"])
    built = traffic.builder.build(output)
    fields = PackedLayout(built.shape).views(built.packed_np)
    assert fields["positions"][:2].tolist() == [5, 8]
    assert fields["token_source"][1] == MAX_NUM_SEQS
    assert fields["token_ids"][1] == traffic.batch.token_ids_np[1, 8] != 0


def test_missing_block_is_found_in_a_repeated_burst():
    traffic = Traffic()
    built, _, _ = traffic.build(traffic.decide(["r0", "r1"], new=prompts(3, 7)))
    traffic.draw(built)
    built, _, _ = traffic.build(traffic.decide(["r0", "r1"]))
    assert isinstance(traffic.builder._burst_repeater, BurstRepeater)
    traffic.draw(built)
    output = traffic.decide(["r0", "r1"], without_blocks=True)
    with pytest.raises(InvariantError, match="'r0' cannot compute 1 tokens"):
        traffic.builder.build(output)

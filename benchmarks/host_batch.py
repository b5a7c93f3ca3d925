"""The host's half of `ModelRunner`: builds steps, and returns random tokens as their results."""

import numpy as np

from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.batch.batch_builder import BatchBuilder
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.step_buckets import StepBuckets


class HostBatch:
    """The rows of running requests and the builder of steps, with one group of attention.

    Args:
        slots: Parts and blocks per state of a group of states; None without states.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        slots: tuple[int, int] | None = None,
    ) -> None:
        tables = [
            TableShape(
                num_groups=1,
                max_blocks_per_req=max_model_len // block_size,
                block_size=block_size,
            )
        ]
        if slots is not None:
            num_parts, blocks_per_state = slots
            tables.append(
                TableShape(
                    num_groups=num_parts,
                    max_blocks_per_req=blocks_per_state,
                    block_size=block_size,
                    is_state=True,
                )
            )
        buckets = StepBuckets(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_decode_burst=1,
            tables=tuple(tables),
            max_model_len=max_model_len,
        )
        self._rows = InputBatch.create(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            tables=buckets.tables,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            seed=0,
        )
        self._builder = BatchBuilder(
            buckets=buckets, input_batch=self._rows, max_num_seqs=max_num_seqs
        )
        rng = np.random.default_rng(0)
        # A step's result, as if the device had drawn these tokens.
        dims = (1, max_num_seqs, RESULT_WIDTH)
        self._result_np = rng.integers(0, vocab_size, dims, dtype=np.int32)

    def start(self, scheduler_output: SchedulerOutput) -> DeviceStep:
        """Builds a step, as `ModelRunner.execute_model` does."""
        self._rows.update(scheduler_output)
        for table in self._rows.block_tables.slot_tables:
            table.pack_new_slots()
        built = self._builder.build(scheduler_output)
        step = DeviceStep(built=built, rows=self._rows)
        self._rows.record_drawn(built.rows_np, built.num_drawn_np, built.num_drafts_np)
        step.result = self._result_np
        return step

    def finish(self, step: DeviceStep) -> ModelRunnerOutput:
        """Returns the tokens of a step."""
        return step.sample_tokens()

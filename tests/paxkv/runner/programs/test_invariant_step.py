"""Batch-invariant steps keep the drafts of a request in one tile if the model has states."""

import random

import numpy as np

from paxkv.runner.programs.invariant_step import _end_of_tile, _state_rows_of_tile
from paxkv.runner.shapes.program_shapes import StepShape

TILE = 5


def test_tiles_end_before_drafts_that_do_not_fit():
    rng = random.Random(0)
    for _ in range(30):
        counts = [(rng.randint(1, 9), rng.randint(0, TILE)) for _ in range(rng.randint(1, 4))]
        starts = np.cumsum([0, *map(sum, counts)])
        # The last row is empty.
        fields = {
            "query_start_loc": np.append(starts, starts[-1]).astype(np.int32),
            "state_ends": np.append(starts[1:] - [n for _, n in counts], 0).astype(np.int32),
            "seq_lens": np.append(np.diff(starts) + 7, 0).astype(np.int32),
        }
        shape = StepShape(
            num_tokens=60,
            num_reqs=len(counts) + 1,
            num_logits=60,
            logits="indices",
            max_draws=1 + TILE,
            tables=(),
            tile_tokens=TILE,
        )
        written = [7] * len(counts)
        start = 0
        while start < starts[-1]:
            end = int(_end_of_tile(fields, np.int32(start), shape))
            assert start < end <= start + TILE
            rows = _state_rows_of_tile(fields, np.int32(start), np.int32(end), shape)
            loc, state_ends = np.asarray(rows.query_start_loc), np.asarray(rows.state_ends)
            for req in range(len(counts)):
                if loc[req] == loc[req + 1]:
                    continue
                # The tile reads the state that earlier tiles wrote, and no draft was among them.
                assert rows.num_computed[req] == written[req]
                assert bool(rows.reads_second[req]) == (written[req] > 7)
                assert loc[req] <= state_ends[req] <= loc[req + 1]
                written[req] += int(state_ends[req] - loc[req])
            start = end
        assert written == [7 + num_known for num_known, _ in counts]

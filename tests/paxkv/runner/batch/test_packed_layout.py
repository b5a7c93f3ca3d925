"""What NumPy writes into the packed buffer is what the device reads."""

import jax
import numpy as np
import pytest

from paxkv.runner.batch.packed_layout import PackedLayout
from paxkv.runner.programs.bucketing import BurstShape, StepShape

SHAPE = StepShape(num_tokens=8, num_reqs=3, num_logits=3, num_groups=2, max_blocks_per_req=5)
BURST_SHAPE = BurstShape(max_steps=4, num_reqs=3, num_groups=2, max_blocks_per_req=5)
both_shapes = pytest.mark.parametrize("shape", [SHAPE, BURST_SHAPE], ids=["step", "burst"])


@both_shapes
def test_round_trip(shape):
    layout = PackedLayout(shape)
    packed_np = np.arange(layout.num_words, dtype=np.int32)
    views = layout.views(packed_np)
    fields = jax.jit(layout.unpack)(packed_np)
    assert views.keys() == fields.keys()
    for name, view in views.items():
        np.testing.assert_array_equal(fields[name], view)


@both_shapes
def test_fields_cover_the_buffer_once_and_writing_a_view_writes_the_buffer(shape):
    layout = PackedLayout(shape)
    packed_np = np.zeros(layout.num_words, np.int32)
    for view in layout.views(packed_np).values():
        view += 1
    assert (packed_np == 1).all()
    assert layout.views(packed_np)["block_tables"].shape == (2, 3, 5)

"""What NumPy writes into the packed buffer is what the device reads."""

import jax
import numpy as np

from paxkv.runner.bucketing import StepShape
from paxkv.runner.packed_layout import PackedLayout

SHAPE = StepShape(num_tokens=8, num_reqs=3, num_logits=3, num_groups=2, max_blocks_per_req=5)


def test_round_trip():
    layout = PackedLayout(SHAPE)
    packed_np = np.arange(layout.num_words, dtype=np.int32)
    views = layout.views(packed_np)
    fields = jax.jit(layout.unpack)(packed_np)
    assert views.keys() == fields.keys()
    for name, view in views.items():
        np.testing.assert_array_equal(fields[name], view)


def test_fields_cover_the_buffer_once_and_writing_a_view_writes_the_buffer():
    layout = PackedLayout(SHAPE)
    packed_np = np.zeros(layout.num_words, np.int32)
    for view in layout.views(packed_np).values():
        view += 1
    assert (packed_np == 1).all()
    assert layout.views(packed_np)["block_tables"].shape == (2, 3, 5)
    assert layout.views(packed_np)["query_start_loc"].shape == (4,)

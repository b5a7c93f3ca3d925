"""What NumPy writes into the packed buffer is what the device reads."""

import dataclasses

import jax
import numpy as np
import pytest

from paxkv.errors import InvariantError
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.shapes.packed_layout import PackedLayout, table_field
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape, TableShape
from paxkv.runner.shapes.step_variant import StepVariant

# Two groups with blocks of 8 tokens, and one with blocks of 16.
TABLES = (
    TableShape(num_groups=2, max_blocks_per_req=5, block_size=8),
    TableShape(num_groups=1, max_blocks_per_req=3, block_size=16),
)
SHAPE = StepShape(num_tokens=8, num_reqs=3, num_logits=3, logits="last", tables=TABLES)
BURST_SHAPE = BurstShape(max_steps=4, num_reqs=3, tables=TABLES, max_model_len=40, chunk_rows=8)
FEATURE_SHAPE = dataclasses.replace(SHAPE, features=(PromptLogprobsVariant(num_logits=0),))
both_shapes = pytest.mark.parametrize(
    "shape", [SHAPE, FEATURE_SHAPE, BURST_SHAPE], ids=["step", "step_with_feature", "burst"]
)


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
    views = layout.views(packed_np)
    assert [views[table_field(idx)].shape for idx in range(2)] == [(2, 3, 5), (1, 3, 3)]


class OtherVariant(StepVariant):
    """A variant with a field that another variant has."""

    def fields(self, *, num_tokens, num_reqs):
        return {"own": (num_reqs,), "next_ids": (num_tokens,)}


def test_features_have_fields_of_their_own():
    fields, plain = PackedLayout(FEATURE_SHAPE).fields(), PackedLayout(SHAPE).fields()
    assert fields == plain | {"next_ids": (SHAPE.num_tokens,)}
    shape = dataclasses.replace(FEATURE_SHAPE, features=(*FEATURE_SHAPE.features, OtherVariant()))
    with pytest.raises(InvariantError, match=r"has already: \['next_ids'\]"):
        PackedLayout(shape).fields()

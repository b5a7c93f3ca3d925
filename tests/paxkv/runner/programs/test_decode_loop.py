"""Rows that have ended change no state while the loop goes on for other rows."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerState
from paxkv.runner.programs.decode_loop import DecodeRows, first_decode_state, run_decode_loop
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.program_shapes import TableShape
from tests.quick_compile import quick_jit

NUM_STEPS = 5
FORMAT = StateFormat(shapes=((1,),))
TABLE = TableShape(num_groups=1, max_blocks_per_req=1, block_size=8, is_state=True)


class AddingModel:
    """Its state is the sum of the tokens of a request."""

    def forward(self, params, pages, batch, apply):
        (inputs,) = batch.groups
        state = LayerState(
            format=FORMAT,
            row=0,
            read_slots=inputs.read_slots[0],
            write_slots=inputs.write_slots[0],
            starts_from_zero=inputs.starts_from_zero,
            is_written=inputs.is_written,
            query_start_loc=inputs.query_start_loc,
            state_ends=inputs.state_ends,
            has_one_token_each=inputs.has_one_token_each,
        )
        (sums,) = FORMAT.read(pages, state)
        sums += batch.token_ids[:, None].astype(jnp.float32)
        return SimpleNamespace(for_logits=sums), FORMAT.write(pages, state, (sums,))

    def compute_logits(self, params, hidden):
        return hidden


def draw_next(params, batch, hidden, state):
    """Draws the number after each row's token."""
    return state.token_ids[:, None] + 1, state.drawing


@pytest.mark.parametrize(
    ("num_tokens", "ending_id", "wanted"),
    [
        pytest.param((5, 2, 1), NO_TOKEN, (10 + 11 + 12 + 13 + 14, 20 + 21, 30), id="numbers"),
        pytest.param((5, 5, 5), 22, (10 + 11 + 12 + 13 + 14, 20 + 21, 160), id="ending token"),
    ],
)
def test_a_row_that_has_ended_writes_no_state(num_tokens, ending_id, wanted):
    rows = DecodeRows(
        num_tokens=jnp.array(num_tokens),
        ending_ids=jnp.full((3, 1), ending_id),
        first_end=jnp.zeros(3, jnp.int32),
        num_used=3,
        # Each row reads and writes a slot of its own. Block 0 is the null block.
        block_tables=(jnp.tile(jnp.arange(1, 4).reshape(1, 1, 3, 1), (2, 1, 1, 1)),),
        table_shapes=(TABLE,),
    )

    def run(pages: jax.Array) -> jax.Array:
        state = first_decode_state(
            token_ids=jnp.array([10, 20, 30]),
            positions=jnp.zeros(3, jnp.int32),
            is_alive=jnp.ones(3, bool),
            pages=pages,
            drawing=(),
            max_steps=NUM_STEPS,
            result_width=1,
        )
        state = run_decode_loop(AddingModel(), (), rows, state, draw_next, num_steps=NUM_STEPS)
        return state.pages

    pages = quick_jit(run)(np.full((1, 4, 128), np.nan, np.float32))
    np.testing.assert_array_equal(pages[0, 1:, 0], wanted)

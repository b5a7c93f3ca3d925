"""A burst draws what single steps draw, stops where a request ends, and writes in place."""

import dataclasses
import functools
import math
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.programs.burst import make_burst
from paxkv.runner.sampling.row_state import abstract_row_state
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampling_columns import Processors, encode_sampling_params
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import BurstShape, RowShape, TableShape
from paxkv.runner.shapes.sampling_row import ROW
from tests.compiler_flags import AS_FOR_USERS
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.placed_model import place_model
from tests.paxkv.runner.greedy_draws import greedy_draws
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, VOCAB, TinyModel
from tests.quick_compile import quick_jit

MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS = 4, 8, 9
PAGE = (2, NUM_HEADS, BLOCK_SIZE, HEAD_DIM)  # keys, then values
# It has one layer, because each test compiles programs. Tests of runners run bursts of more.
MODEL = TinyModel(windows=(None,))
GREEDY = (SamplingParams(temperature=0.0),) * 2
TABLE = TableShape(num_groups=1, max_blocks_per_req=3, block_size=BLOCK_SIZE)
SHAPE = BurstShape(max_steps=6, num_reqs=3, tables=(TABLE,), max_model_len=24, chunk_rows=3)


def abstract(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


# One byte of temporary memory per block would show in a cache of this many blocks.
NUM_ABSTRACT_BLOCKS = 2**20
MAX_TOKENS = 2**17


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_random_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=2)
    return load_model(folder)


@pytest.mark.parametrize(
    ("num_reqs", "max_steps", "dtype", "draws"),
    [
        pytest.param(1, 1, "float32", nullcontext, id="1-1-f32", marks=pytest.mark.slow),
        pytest.param(1, 1, "bfloat16", nullcontext, id="1-1-bf16", marks=pytest.mark.slow),
        # `test_sampler_program.py` measures the sampler's memory.
        pytest.param(4, 8, "float32", greedy_draws, id="4-8-f32-greedy"),
        pytest.param(4, 8, "float32", nullcontext, id="4-8-f32", marks=pytest.mark.slow),
        pytest.param(4, 8, "float16", nullcontext, id="4-8-f16", marks=pytest.mark.slow),
        pytest.param(4, 8, "bfloat16", nullcontext, id="4-8-bf16", marks=pytest.mark.slow),
    ],
)
def test_burst_writes_the_cache_in_place(llama, num_reqs, max_steps, dtype, draws):
    """The whole cache is aliased, and temporary memory does not grow with it."""
    shape = dataclasses.replace(
        SHAPE, max_steps=max_steps, num_reqs=num_reqs, max_model_len=MAX_TOKENS
    )
    placed = place_model(llama, block_size=BLOCK_SIZE, dtype=dtype)
    pages = jax.eval_shape(lambda: placed.empty_pages(NUM_ABSTRACT_BLOCKS))
    assert pages.shape == (2, NUM_ABSTRACT_BLOCKS, 2 * 2 * BLOCK_SIZE * 16)
    packed = abstract(PackedLayout(shape).num_words)
    burst = jax.jit(make_burst(placed.model, shape), donate_argnums=(1, 4, 5))
    vocab_size = llama.config.vocab_size
    logits = abstract(4, vocab_size, dtype=jnp.float32)
    row_shape = RowShape(num_rows=4, max_model_len=MAX_TOKENS)
    rows = abstract_row_state(row_shape, vocab_size, None)
    with draws():
        lowered = burst.lower(llama.params, pages, packed, abstract(4), logits, rows)
    analysis = lowered.compile(AS_FOR_USERS).memory_analysis()
    kept = (pages, logits, *jax.tree.leaves(rows))
    kept_bytes = sum(array.size * array.dtype.itemsize for array in kept)
    assert analysis.alias_size_in_bytes >= kept_bytes
    # Neither a copy of the cache, nor one of the tokens of all rows.
    assert analysis.temp_size_in_bytes < min(NUM_ABSTRACT_BLOCKS, 4 * 4 * MAX_TOKENS)


@functools.cache
def compiled_burst(max_steps, widths=(), make=make_burst, drafts=None):
    """One program of each shape for all `TinyBursts`."""
    # Two rows at a time, so that three take turns.
    shape = dataclasses.replace(
        SHAPE, max_steps=max_steps, widths=widths, chunk_rows=2, drafts=drafts
    )
    return quick_jit(make(MODEL, shape))


class TinyBursts:
    """Bursts of a tiny model over a cache that one token of each request was written to.

    Args:
        make: Makes the burst, which verifies drafts if there is `drafts`.
        history: i32[num_reqs, num_tokens], the requests' tokens, in which drafts are found.
    """

    def __init__(self, params=GREEDY, widths=(), *, make=make_burst, drafts=None, history=None):
        self.settings = (widths, make, drafts)
        self.params = params
        self.kv_cache = np.zeros((1, NUM_BLOCKS, math.prod(PAGE)), np.float32)
        num_draws = 1 if drafts is None else 1 + drafts.num_drafts
        self.logits = np.zeros((MAX_NUM_SEQS * num_draws, VOCAB), np.float32)
        row_shape = RowShape(num_rows=MAX_NUM_SEQS, max_model_len=24)
        self.row_state = jax.tree.map(
            lambda array: np.zeros(array.shape, array.dtype),
            abstract_row_state(row_shape, VOCAB, None),
        )
        if history is not None:
            num_reqs, num_tokens = np.shape(history)
            self.row_state.token_ids[:num_reqs, :num_tokens] = history

    def run(
        self, num_tokens, *, tokens, position=0, num_steps=None, max_steps=6, ending=(), first_end=0
    ):
        """Runs one burst; row r computes `num_tokens[r]` tokens from `tokens[r]` on.

        Returns:
            Drawn tokens i32[max_steps, num_reqs], and the last ones i32[MAX_NUM_SEQS]. The whole
            result stays in `result_np`.
        """
        shape = dataclasses.replace(SHAPE, max_steps=max_steps)
        layout = PackedLayout(shape)
        packed_np = np.zeros(layout.num_words, np.int32)
        views = layout.views(packed_np)
        num_reqs = len(num_tokens)
        views["num_steps"][:] = max(num_tokens) if num_steps is None else num_steps
        views["num_tokens"][:num_reqs] = num_tokens
        views["token_ids"][:num_reqs] = tokens
        views["token_source"][:] = MAX_NUM_SEQS
        views["positions"][:num_reqs] = position
        views["draws"][:num_reqs] = 1
        views["block_tables_0"][0, :num_reqs] = 1 + np.arange(3 * num_reqs).reshape(num_reqs, 3)
        views["ending_ids"][:] = NO_TOKEN
        views["ending_ids"][:, : len(ending)] = ending
        views["first_end"][:] = first_end
        for row, params in enumerate(self.params):
            views["sampling_rows"][row] = encode_sampling_params(
                params, seed=row, vocab_size=VOCAB, processors=Processors.TOKEN_HISTORY
            )
            views["sampling_rows"][row, ROW] = row
        self.kv_cache, self.logits, self.row_state, _, result, last, _ = compiled_burst(
            max_steps, *self.settings
        )(
            *(MODEL.params, self.kv_cache, packed_np, np.zeros(MAX_NUM_SEQS, np.int32)),
            *(self.logits, self.row_state),
        )
        self.pages_np = np.asarray(self.kv_cache).reshape(1, NUM_BLOCKS, *PAGE)
        self.result_np = np.asarray(result)
        return self.result_np[:, :, 0], np.asarray(last)

    def run_single_steps(self, num_steps, *, tokens):
        """The same as steps of one token, each fed by the host."""
        drawn = []
        for position in range(num_steps):
            step, _ = self.run([1] * len(tokens), tokens=tokens, position=position)
            tokens = step[0, : len(tokens)]
            drawn.append(tokens.tolist())
        return drawn


MIXED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, min_p=0.01),
)


@pytest.mark.parametrize("params", [GREEDY[:1] * 3, MIXED])
@pytest.mark.parametrize("num_reqs", [1, 2, 3])
def test_burst_does_not_depend_on_widths(params, num_reqs):
    """Nor on the number of rows that are drawn at a time."""
    num_tokens = [6, 4, 5][:num_reqs]
    one, several = (TinyBursts(params[:num_reqs], widths) for widths in ((), (2, 3)))
    for bursts in (one, several):
        bursts.run(num_tokens, tokens=[3, 4, 5][:num_reqs])
    np.testing.assert_array_equal(several.result_np[:, :, 0], one.result_np[:, :, 0])
    # Logits of another width are rounded otherwise.
    logprobs_np = [bursts.result_np[:, :, 1].view(np.float32) for bursts in (several, one)]
    is_drawn_np = one.result_np[:, :, 0] != NO_TOKEN
    np.testing.assert_allclose(*(x[is_drawn_np] for x in logprobs_np), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_burst_draws_what_single_steps_draw(temperature):
    params = [SamplingParams(temperature=temperature)] * 2
    expected = TinyBursts(params).run_single_steps(6, tokens=[3, 4])
    bursts = TinyBursts(params)
    drawn_np, last_np = bursts.run([6, 6], tokens=[3, 4])
    assert drawn_np[:, :2].tolist() == expected
    assert (drawn_np[:, 2] == NO_TOKEN).all()  # no request has this row
    assert last_np[:2].tolist() == expected[-1]
    dense = MODEL.dense_logits([3, *[row[0] for row in expected]])
    if temperature == 0:
        assert [row[0] for row in expected] == dense[:6].argmax(axis=-1).tolist()


def test_row_with_fewer_tokens_stops_first_and_the_others_continue():
    expected = np.array(TinyBursts().run_single_steps(5, tokens=[3, 4]))
    drawn_np, last_np = TinyBursts().run([2, 5], tokens=[3, 4])
    assert drawn_np[:5, 1].tolist() == expected[:, 1].tolist()
    assert drawn_np[:, 0].tolist() == [*expected[:2, 0], *[NO_TOKEN] * 4]
    assert last_np[:2].tolist() == [expected[1, 0], expected[4, 1]]


def test_number_of_steps_ends_a_burst_before_its_shape_does():
    expected = TinyBursts().run_single_steps(2, tokens=[3, 4])
    drawn_np, _ = TinyBursts().run([6, 6], tokens=[3, 4], num_steps=2)
    assert drawn_np[:2, :2].tolist() == expected
    assert (drawn_np[2:] == NO_TOKEN).all()


@pytest.mark.parametrize("first_end", [0, 3, 4])
def test_row_stops_after_an_ending_token_from_its_first_allowed_place_on(first_end):
    expected = np.array(TinyBursts().run_single_steps(6, tokens=[3, 4]))
    ending = int(expected[2, 0])  # the third drawn token, at position 3
    assert ending not in expected[:2, 0] and ending not in expected[:, 1]
    drawn_np, last_np = TinyBursts().run(
        [6, 6], tokens=[3, 4], ending=[ending], first_end=first_end
    )
    assert drawn_np[:, 1].tolist() == expected[:, 1].tolist()
    ends_there = [*expected[:3, 0], *[NO_TOKEN] * 3]
    if first_end <= 3:
        assert drawn_np[:, 0].tolist() == ends_there
        assert last_np[0] == ending
    else:
        later = expected[3:, 0].tolist()
        num_kept = 3 + (later.index(ending) + 1 if ending in later else len(later))
        assert drawn_np[:num_kept, 0].tolist() == expected[:num_kept, 0].tolist()


def test_row_that_has_ended_changes_nothing_in_the_cache():
    """Its last token is computed again in its own slot; no other slot is written."""
    alone, beside = TinyBursts(), TinyBursts()
    alone.run([2, 2], tokens=[3, 4])
    beside.run([2, 6], tokens=[3, 4])
    own_np = [bursts.pages_np[:, 1:4] for bursts in (alone, beside)]
    np.testing.assert_allclose(*own_np, atol=1e-6)
    for part in range(2):  # keys, then values
        # [num_blocks, block_size]
        written_np = beside.pages_np[:, :, part].any(axis=(0, 2, 4))
        assert written_np[1].tolist() == [True] * 2 + [False] * 6
        assert written_np[4].tolist() == [True] * 6 + [False] * 2
        assert not written_np[0].any()

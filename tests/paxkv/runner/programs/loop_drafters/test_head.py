"""A head inside the loop proposes the drafts that it proposes over a whole text at once.

If the model has states, the loop leaves the states that it would leave without drafts.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from models.decoder_spec import with_drafter
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head
from paxkv.runner.features.head_memory import head_memory_arrays, read_memory
from paxkv.runner.features.target_hidden import TargetHiddenVariant
from paxkv.runner.features.traced_features import TracedFeatures
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.decode_loop import DecodeRows
from paxkv.runner.programs.drafting_loop import DraftingState, run_drafting_loop
from paxkv.runner.programs.loop_drafters.base import LoopDrafter
from paxkv.runner.programs.loop_drafters.head import HeadLoopDrafter
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.sampling_row import DRAW_REQ, NUM_COLUMNS
from tests.end_to_end.split_configs import CONFIGS
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.models.drafters.head_stepper import HeadStepper
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.quick_compile import quick_jit

VOCAB, HIDDEN, BLOCK_SIZE, MAX_TOKENS = 48, 96, 8, 24
NUM_DRAFTS, MAX_STEPS = 3, 24
# The second row ends long before the first one. The third row has no request.
FIRST_IDS, NUM_TOKENS = [5, 9, 0], [18, 8, 0]
# With states: the position of the first token whose state is written to the second slot.
SLOT_SWITCHES = [7, 5, 0]


class RecordingDrafter(LoopDrafter):
    """Records the position of each row's last known token and its drafts, in each step."""

    num_drafts = NUM_DRAFTS

    def __init__(self, drafter):
        self._drafter = drafter

    def first_memory(self, num_rows):
        record = jnp.full((MAX_STEPS, num_rows, 1 + NUM_DRAFTS), NO_TOKEN, jnp.int32)
        return self._drafter.first_memory(num_rows), record, jnp.int32(0)

    def propose(self, drafted, pages, memory):
        return self._drafter.propose(drafted, pages, memory[0])

    def read_step(self, rows, step, pages, memory):
        own, record, step_idx = memory
        starts, ends = step.first_draws[:, None], step.batch.query_start_loc[1:, None]
        places = starts + jnp.arange(1, 1 + NUM_DRAFTS)
        drafts = jnp.take(step.batch.token_ids, places, mode="clip")
        drafts = jnp.where(places < ends, drafts, NO_TOKEN)
        found = jnp.concatenate([jnp.take(step.batch.positions, starts, mode="clip"), drafts], 1)
        pages, own = self._drafter.read_step(rows, step, pages, own)
        return pages, (own, record.at[step_idx].set(found), step_idx + 1)


def draw(params, batch, hidden, sampling, drawing):
    """Accepts some drafts, and draws other tokens in place of the others."""
    token_idx = batch.logits_indices
    accepts = batch.positions[token_idx] * (2 + sampling[:, DRAW_REQ]) % 5 != 0
    token_ids, following = batch.token_ids[token_idx], jnp.roll(batch.token_ids, -1)[token_idx]
    return jnp.where(accepts, following, (token_ids + 7) % VOCAB)[:, None], drawing


def run_loop(model, head, tables, widths, params, head_params, pages, block_tables):
    num_rows = len(FIRST_IDS)
    has_states = any(table.is_state for table in tables)
    arrays = head_memory_arrays(num_rows=num_rows, hidden_size=HIDDEN, dtype="float32")
    kept = {name: jnp.zeros(array.dims, array.dtype) for name, array in arrays.items()}
    tenancies = jnp.array([[0, 1, 0], [1, 2, 0]])
    drafter = HeadLoopDrafter(
        first=read_memory(kept, tenancies, positions=jnp.zeros(num_rows, jnp.int32)),
        model=model,
        params=params,
        head=head,
        head_params=head_params,
        num_drafts=NUM_DRAFTS,
        widths=widths,
    )
    recording = RecordingDrafter(drafter)
    rows = DecodeRows(
        num_tokens=jnp.array(NUM_TOKENS),
        ending_ids=jnp.full((num_rows, 1), NO_TOKEN),
        first_end=jnp.zeros(num_rows, jnp.int32),
        num_used=jnp.int32(2),
        block_tables=block_tables,
        slot_switches=jnp.array(SLOT_SWITCHES) if has_states else None,
        table_shapes=tables,
    )
    num_tokens = num_rows * (1 + NUM_DRAFTS * (2 if has_states else 1))
    variant = TargetHiddenVariant(
        num_tokens=num_tokens, hidden_size=HIDDEN, dtype="float32", taps=head.taps
    )
    features = TracedFeatures((variant,), ({},), num_tokens=num_tokens, num_reqs=num_rows)
    hidden = {"target_hidden": jnp.zeros((num_tokens, HIDDEN * len(head.taps)))}
    has_request = jnp.array(NUM_TOKENS) > 0
    state = DraftingState(
        token_ids=jnp.zeros((num_rows, MAX_TOKENS), jnp.int32).at[:, 0].set(jnp.array(FIRST_IDS)),
        positions=jnp.zeros(num_rows, jnp.int32),
        num_drawn=jnp.zeros(num_rows, jnp.int32),
        is_alive=has_request,
        pages=pages,
        drawing=(),
        results=jnp.full((max(NUM_TOKENS), num_rows, 2), NO_TOKEN, jnp.int32),
        num_steps=jnp.int32(0),
        memory=recording.first_memory(num_rows),
        feature_values=features.first_values((hidden,)),
        num_in_state=(~has_request).astype(jnp.int32) if has_states else None,
    )
    sampling_rows = jnp.zeros((num_rows, NUM_COLUMNS), jnp.int32)
    state = run_drafting_loop(
        *(model, params, rows, state, sampling_rows, recording, draw), features=features
    )
    _, record, num_steps = state.memory
    return state.token_ids, record, num_steps, state.pages


@pytest.fixture(
    scope="module", params=["llama", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    if request.param == "llama":
        target = write_random_checkpoint(
            folder / "target", num_layers=2, vocab_size=VOCAB, hidden_size=HIDDEN
        )
        model = load_model(target, dtype="float32")
    else:
        sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN}
        (folder / "config.json").write_text(json.dumps(CONFIGS[request.param] | sizes))
        model = load_model(folder, dtype="float32", load_format="dummy")
    write_eagle3_head(
        folder / "head",
        vocab_size=VOCAB,
        draft_vocab_size=40,
        layer_ids=[1, 2],
        num_key_value_heads=1,
    )
    encoder = KernelEncoder(platform=model.platform)
    return model, load_eagle3_head(model, folder / "head", encoder=encoder)


@pytest.mark.parametrize("widths", [pytest.param((), marks=pytest.mark.slow), (2, 3)])
def test_drafts_are_those_of_the_head_alone(loaded, widths):
    model, head = loaded
    spec = with_drafter(model.config.spec("float32"), head.config.spec("float32"))
    groups = groups_of_spec(spec, block_size=BLOCK_SIZE)
    places, num_layers = groups.places(spec), model.config.num_layers
    placed, placed_head = (
        model.with_places(places[:num_layers]),
        head.with_places(places[num_layers:]),
    )
    tables, block_tables, first = groups.tables(MAX_TOKENS), [], 1
    for table in tables:
        ends = np.arange(first, first + np.prod(table.dims(3)), dtype=np.int32)
        block_tables.append(ends.reshape(table.dims(3)))
        first += ends.size
    pages = empty_kv_cache(groups.config(first), model.platform, "float32")
    run = functools.partial(run_loop, placed, placed_head, tables, widths)
    token_ids, record, num_steps, pages = jax.device_get(
        quick_jit(run)(model.params, head.params, pages, tuple(block_tables))
    )
    stepper = HeadStepper(model, head, max_tokens=MAX_TOKENS, width=MAX_TOKENS)
    assert (record[0, :2] == [[0, *[NO_TOKEN] * NUM_DRAFTS]] * 2).all()
    counts = []
    for row in (0, 1):
        last = NUM_TOKENS[row]
        for position, *drafts in record[1:num_steps, row].tolist():
            found = [draft for draft in drafts if draft != NO_TOKEN]
            if found:
                known = token_ids[row, : position + 1].tolist()
                assert found == stepper.drafts(known, len(found))
                counts.append(len(found))
                assert position + len(found) < last
    assert counts.count(NUM_DRAFTS) > 4 and min(counts) < NUM_DRAFTS
    assert num_steps < 12
    states = [places for places, table in zip(block_tables, tables, strict=True) if table.is_state]
    for row, (switch, last) in enumerate(zip(SLOT_SWITCHES, NUM_TOKENS, strict=True)):
        # The first slot keeps the state before the switch, and the second one has the newest state.
        for slot, num_known in ((0, switch), (1, last)):
            if states and num_known:
                stepper.compute_hidden(token_ids[row, :num_known].tolist(), 0)
                found, wanted = pages[:, states[0][slot, :, row]], stepper.states()
                np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
                assert np.abs(wanted).max() > 0.01

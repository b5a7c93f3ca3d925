"""New kinds of KV memory are new formats and layers: four of them, against dense truth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache.rules import recast
from models.decoders.layer_loop import run_in_loop, run_in_turn
from models.platforms.cpu import CPU
from tests import on_device
from tests.compiler_flags import AS_FOR_USERS
from tests.models.cache.formats_of_tests import (
    DECAY,
    HIDDEN,
    AttentionAndIndexLayer,
    AttentionAndSumLayer,
    AttentionLayer,
    Stack,
)

PLATFORM = CPU.of_this_machine()
MIB = 2**20
# Tokens of each request in each step; two requests go on, one is new in the second step.
STEPS = ((5, 3, 0), (1, 6, 9), (1, 1, 1), (8, 0, 1))


def two_head_sizes():
    # Pages of 4 heads of 8 and of 2 heads of 8: blocks of 4 and of 8 tokens.
    return [
        AttentionLayer(seed, num_kv_heads=num_kv_heads, head_dim=8)
        for seed, num_kv_heads in enumerate((2, 1, 2, 1))
    ]


STACKS = {
    "attention_and_state": lambda: [AttentionAndSumLayer(seed) for seed in range(3)],
    # A page has 512 bytes, the copies 1,600: a slot of five blocks.
    "attention_and_long_state": lambda: [
        AttentionAndSumLayer(seed, num_copies=50) for seed in range(3)
    ],
    "main_and_index_cache": lambda: [AttentionAndIndexLayer(seed) for seed in range(3)],
    "two_head_sizes": two_head_sizes,
    # 2 heads of 8 and 1 of 12: heads of 16 in a third of whose pages nothing lies.
    "widened_heads": lambda: [
        AttentionLayer(0, num_kv_heads=2, head_dim=8),
        AttentionLayer(1, num_kv_heads=1, head_dim=12),
    ],
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}


@pytest.mark.parametrize(
    ("name", "kv_dtype", "run"),
    [
        pytest.param("attention_and_state", "float32", run_in_loop, marks=pytest.mark.slow),
        pytest.param("attention_and_state", "bfloat16", run_in_turn, marks=pytest.mark.slow),
        ("attention_and_long_state", "float32", run_in_loop),
        pytest.param("attention_and_long_state", "bfloat16", run_in_turn, marks=pytest.mark.slow),
        pytest.param("main_and_index_cache", "float32", run_in_turn, marks=pytest.mark.slow),
        ("main_and_index_cache", "bfloat16", run_in_loop),
        ("two_head_sizes", "float32", run_in_loop),
        pytest.param("two_head_sizes", "float16", run_in_turn, marks=pytest.mark.slow),
        ("widened_heads", "float32", run_in_turn),
    ],
)
def test_layers_give_the_dense_truth(name, kv_dtype, run):
    layers = STACKS[name]()
    stack = Stack(layers, PLATFORM, run, kv_dtype=kv_dtype)
    tables = stack.block_tables(len(STEPS[0]), num_blocks=256)
    # Nothing that was not written may be read.
    pages = stack.pages(256)
    pages = jnp.full_like(pages, 0x7FC1 if pages.dtype == jnp.uint16 else jnp.nan)
    step = jax.jit(stack.step, donate_argnums=0)
    rng = np.random.default_rng(1)
    inputs = [rng.normal(size=(sum(counts), HIDDEN)) for counts in zip(*STEPS, strict=True)]
    got = [[] for _ in inputs]
    seq_lens = np.zeros(len(inputs), np.int32)
    num_tokens = max(map(sum, STEPS)) + 2
    for counts in STEPS:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        hidden = np.zeros((num_tokens, HIDDEN), np.float32)
        positions = np.zeros(num_tokens, np.int32)
        for row, count in enumerate(counts):
            own = slice(starts[row], starts[row + 1])
            positions[own] = seq_lens[row] + np.arange(count)
            hidden[own] = inputs[row][positions[own]]
            seq_lens[row] += count
        lens = np.where(np.asarray(counts) > 0, seq_lens, 0).astype(np.int32)
        out, pages = step(pages, hidden, positions, starts, lens, tables)
        for row in range(len(counts)):
            got[row].append(np.asarray(out)[starts[row] : starts[row + 1]])
    for own, rows in zip(inputs, got, strict=True):
        wanted = dense(layers, own)
        difference = np.abs(np.concatenate(rows) - wanted).max()
        assert difference <= TOLERANCES[kv_dtype] * np.abs(wanted).max()


def dense(layers, hidden):  # f64[num_tokens, HIDDEN] -> the same
    """One request at once, without a cache, in NumPy."""
    for layer in layers:
        x = hidden
        if isinstance(layer, AttentionAndIndexLayer):
            vectors = hidden[:, : HIDDEN // 2]
            mean = np.cumsum(vectors, axis=0) / np.arange(1, len(hidden) + 1)[:, None]
            x = hidden = hidden + np.concatenate([mean, mean], axis=1)
        out = x + dense_attention(layer.self_attn, x)
        if isinstance(layer, AttentionAndSumLayer):
            out = out + DECAY * np.cumsum(x, axis=0)
        hidden = out
    return hidden


def dense_attention(attention, x):
    config = attention.config
    q, k, v, out = (
        np.asarray(linear.kernel.get_value(), np.float64)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    )
    num_tokens, half = len(x), config.head_dim // 2
    angles = np.arange(num_tokens)[:, None] * config.rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def heads(kernel):
        return (x @ kernel).reshape(num_tokens, -1, config.head_dim)

    def turned(heads):
        left, right = heads[..., :half], heads[..., half:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    group_size = config.num_q_heads // config.num_kv_heads
    keys, values = (np.repeat(y, group_size, axis=1) for y in (turned(heads(k)), heads(v)))
    scores = np.einsum("qhd,khd->hqk", turned(heads(q)), keys) * config.scale
    scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(num_tokens, -1) @ out


@pytest.mark.parametrize(
    ("name", "num_reqs", "kv_dtype", "run"),
    [
        ("attention_and_long_state", 16, "bfloat16", run_in_loop),
        ("attention_and_state", 1, "bfloat16", run_in_turn),
        *(
            pytest.param(name, num_reqs, kv_dtype, run, marks=pytest.mark.slow)
            for name in STACKS
            for num_reqs in (1, 16)
            for kv_dtype in ("float32", "bfloat16", "float16")
            for run in (run_in_turn, run_in_loop)
        ),
    ],
)
def test_a_decode_step_copies_no_pages(name, run, kv_dtype, num_reqs):
    """With the options that users compile with; the suite's own leave copies in."""
    layers = STACKS[name]()
    if run is run_in_turn:
        # A layer with a state writes to the pages after it has read them. Where no layer has one,
        # the second layer writes after the first has read.
        layers = layers[: 1 if isinstance(layers[0], AttentionAndSumLayer) else 2]
    stack = Stack(layers, PLATFORM, run, kv_dtype=kv_dtype, max_len=16)
    page_bytes = stack.groups.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    num_blocks = 64 * MIB // (stack.groups.config(2).num_rows * page_bytes)
    pages = jax.eval_shape(functools.partial(stack.pages, num_blocks))
    tables = [jax.ShapeDtypeStruct(t.dims(num_reqs), jnp.int32) for t in stack.table_shapes]
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    compiled = (
        jax.jit(
            stack.step,
            donate_argnums=0,
            compiler_options=PLATFORM.compiler_options(["float32"]) | AS_FOR_USERS,
        )
        .lower(
            pages,
            jax.ShapeDtypeStruct((num_reqs, HIDDEN), jnp.float32),
            ints((num_reqs,)),
            ints((num_reqs + 1,)),
            ints((num_reqs,)),
            tables,
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 60 * MIB
    assert memory.temp_size_in_bytes < 6 * MIB


@pytest.mark.parametrize("lanes", [(), (1,)])
@pytest.mark.parametrize("stored", ["uint16", "float32"])
def test_bits_survive_pages_of_another_dtype(stored, lanes):
    # NaN payloads, infinities, zeros with a sign and subnormals among them.
    bits = np.array([0, 1 << 31, 0x7F800001, 0x7FC12345, 0xFF800000, 1, 0x3F800000], np.uint32)
    values = on_device.array(bits.view(np.float32)).reshape(1, -1, *lanes)
    words = jax.jit(recast, static_argnums=1)(values, stored)
    assert words.shape == (1, len(bits) * 4 // jnp.dtype(stored).itemsize, *lanes)
    again = jax.jit(recast, static_argnums=1)(words, "float32")
    np.testing.assert_array_equal(np.asarray(again).view(np.uint32).reshape(-1), bits)


def test_pages_agree_in_bytes():
    stack = Stack(two_head_sizes(), PLATFORM, run_in_turn)
    assert [t.block_size for t in stack.table_shapes] == [4, 8]
    stack = Stack(STACKS["widened_heads"](), PLATFORM, run_in_turn)
    widths = {cache.head_dim for cache in stack.groups.formats.values()}
    assert widths == {8, 16}
    assert set(stack.groups.padded_shares.values()) == {0.25}


def test_a_layer_that_asks_for_an_unknown_cache_gets_an_error():
    layers = [AttentionAndSumLayer(0)]
    stack = Stack(layers, PLATFORM, run_in_turn)
    stack.places = tuple(places[:1] for places in stack.places)
    pages = stack.pages(64)
    with pytest.raises(Exception, match="asks for its cache 'sum' and has"):
        jax.eval_shape(
            stack.step,
            pages,
            on_device.ones((1, HIDDEN)),
            on_device.zeros(1, jnp.int32),
            on_device.array([0, 1], jnp.int32),
            on_device.array([1], jnp.int32),
            stack.block_tables(1, 64),
        )

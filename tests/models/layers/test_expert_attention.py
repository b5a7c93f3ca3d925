"""`ExpertAttention`: the experts of a token make its queries and project what they attend to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.decoders.chosen_layer import choose_layer
from models.forward.layer_context import LayerContext
from models.layers.expert_attention import ExpertAttention, RoutedHeads
from models.layers.routing import SoftmaxTopK
from tests import on_device
from tests.models.layers.test_layer_stack import put_in_stacks
from tests.models.plain_context import plain_context

NUM_ROWS, HIDDEN, NUM_EXPERTS, TOP_K, NUM_KV_HEADS, HEAD_DIM = 5, 6, 4, 2, 3, 2
CONFIG = AttentionConfig(
    hidden_size=HIDDEN,
    num_q_heads=NUM_KV_HEADS * TOP_K,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    rope=RopeConfig(),
    scale=1.0,
)


def make_attention(rng: np.random.Generator) -> ExpertAttention:
    """With random weights and biases."""
    choose = SoftmaxTopK(top_k=TOP_K, normalizes=True)
    attention = ExpertAttention(
        CONFIG, num_experts=NUM_EXPERTS, choose=choose, dtype=jnp.dtype("float32")
    )
    parts = (attention.router, attention.q_proj, attention.o_proj)
    for param in (*(part.kernel for part in parts), attention.bias):
        values = rng.standard_normal(param.get_value().shape)
        param.set_value(on_device.array(values, jnp.float32))
    return attention


def make_context() -> LayerContext:
    """One request, whose tokens are all at position 0."""
    shape = (NUM_ROWS, HEAD_DIM // 2)
    cos_sin = {CONFIG.rotary: (on_device.ones(shape), on_device.zeros(shape))}
    return dataclasses.replace(plain_context(NUM_ROWS), cos_sin=cos_sin)


def test_a_query_head_is_of_one_choice_and_one_kv_head():
    rng = np.random.default_rng(0)
    attention = make_attention(rng)
    x_np = rng.standard_normal((NUM_ROWS, HIDDEN)).astype(np.float32)
    (q, routing), _, _ = jax.jit(
        lambda x: attention.project_in(x, make_context(), norm=lambda x: x)
    )(x_np)
    scores_np = x_np @ np.asarray(attention.router.kernel[...])
    best_np = np.argsort(-scores_np)[:, :TOP_K]
    np.testing.assert_array_equal(routing.expert_ids, best_np)
    q_np, kernels_np = np.asarray(q), np.asarray(attention.q_proj.kernel[...])
    for row in range(NUM_ROWS):
        for choice in range(TOP_K):
            heads_np = (x_np[row] @ kernels_np[best_np[row, choice]]).reshape(-1, HEAD_DIM)
            for kv_head in range(NUM_KV_HEADS):
                got = q_np[row, kv_head * TOP_K + choice]
                np.testing.assert_allclose(got, heads_np[kv_head], rtol=1e-5, atol=1e-5)


def test_the_output_is_the_weighted_sum_of_the_experts_and_one_bias():
    rng = np.random.default_rng(1)
    attention = make_attention(rng)
    attended_np = rng.standard_normal((NUM_ROWS, NUM_KV_HEADS * TOP_K, HEAD_DIM))
    expert_ids_np = np.array([[0, 1], [3, 2], [1, 0], [3, 1], [2, 3]])
    weights_np = rng.uniform(0.1, 1, (NUM_ROWS, TOP_K))
    heads = RoutedHeads(
        on_device.array(attended_np, jnp.float32),
        on_device.array(expert_ids_np, jnp.int32),
        on_device.array(weights_np, jnp.float32),
    )
    got = jax.jit(lambda heads: attention.project_out(heads, make_context()))(heads)
    kernels_np = np.asarray(attention.o_proj.kernel[...], np.float64)
    for row in range(NUM_ROWS):
        expected_np = np.asarray(attention.bias[...], np.float64)
        for choice in range(TOP_K):
            own_np = attended_np[row, choice::TOP_K].reshape(-1)
            out_np = own_np @ kernels_np[expert_ids_np[row, choice]]
            expected_np = expected_np + weights_np[row, choice] * out_np
        np.testing.assert_allclose(got[row], expected_np, rtol=1e-5, atol=1e-5)


def test_layers_whose_experts_are_in_a_stack_compute_as_layers_apart():
    apart, in_stacks = (
        [make_attention(np.random.default_rng(seed)) for seed in (0, 1, 2)] for _ in range(2)
    )
    put_in_stacks(in_stacks)
    x = on_device.array(np.random.default_rng(3).standard_normal((NUM_ROWS, HIDDEN)), jnp.float32)

    def run(attention: ExpertAttention) -> tuple[jax.Array, jax.Array]:
        context = make_context()
        (q, routing), _, _ = attention.project_in(x, context, norm=lambda x: x)
        return q, attention.project_out(RoutedHeads(q, *routing), context)

    wanted = jax.jit(lambda: [run(attention) for attention in apart])()
    chosen = jax.jit(lambda idx: run(choose_layer(in_stacks, idx)))
    for layer_idx, of_layer in enumerate(wanted):
        for got, expected in zip(chosen(layer_idx), of_layer, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

"""Experts of fewer features: what the router reads, and what is normed."""

import jax
import jax.numpy as jnp
import numpy as np

from models.layers.linear import Linear
from models.layers.narrow_sparse_mlp import NarrowSparseMLP, NormedExperts, ScaledSigmoidTopK
from models.layers.routing import CorrectedRouter, SigmoidTopK
from tests.models.plain_context import plain_context

WIDE, NARROW, INNER, NUM_EXPERTS = 6, 4, 5, 3


def double(x: jax.Array) -> jax.Array:
    return 2.0 * x


def halve(x: jax.Array) -> jax.Array:
    return 0.5 * x


def test_block_by_hand():
    block = NarrowSparseMLP(
        gate=CorrectedRouter(WIDE, NUM_EXPERTS),
        choose=ScaledSigmoidTopK(top_k=2, score_scale=0.5),
        pre_expert_proj=Linear(WIDE, NARROW, dtype=jnp.float32),
        pre_expert_norm=double,
        experts=NormedExperts(
            *(NUM_EXPERTS, NARROW, INNER), activation="silu", norm=halve, dtype=jnp.float32
        ),
        post_expert_proj=Linear(NARROW, WIDE, dtype=jnp.float32),
    )
    rng = np.random.default_rng(0)
    linears = (block.gate, block.pre_expert_proj, block.post_expert_proj)
    experts = block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj
    for linear in (*linears, *experts):
        values = rng.standard_normal(linear.kernel.get_value().shape)
        linear.kernel.set_value(jnp.asarray(values, jnp.float32))
    x = rng.standard_normal((3, WIDE)).astype(np.float32)
    got = jax.jit(lambda x: block(x, plain_context(3)))(x)

    gate, before, after = (np.asarray(linear.kernel.get_value(), np.float64) for linear in linears)
    kernels = [np.asarray(linear.kernel.get_value(), np.float64) for linear in experts]
    wanted = np.zeros((3, WIDE))
    for row_idx, row in enumerate(x.astype(np.float64)):
        likely = 1 / (1 + np.exp(-0.5 * row @ gate))
        best = np.argsort(-likely)[:2]
        narrow = 2.0 * row @ before
        for expert in best:
            gated, up, down = (kernel[expert] for kernel in kernels)
            scores = narrow @ gated
            out = 0.5 * ((scores / (1 + np.exp(-scores))) * (narrow @ up)) @ down
            wanted[row_idx] += likely[expert] / likely[best].sum() * out @ after
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_scores_are_scaled_and_corrections_are_not():
    scores, bias = jnp.array([[4.0, 2.0, -2.0]]), jnp.array([0.0, 0.5, 0.0])
    scaled = ScaledSigmoidTopK(top_k=2, score_scale=0.5, factor=3.0)(scores, bias)
    plain = SigmoidTopK(top_k=2, factor=3.0)(0.5 * scores, bias)
    assert scaled.expert_ids.tolist() == plain.expert_ids.tolist() == [[1, 0]]
    np.testing.assert_array_equal(scaled.weights, plain.weights)

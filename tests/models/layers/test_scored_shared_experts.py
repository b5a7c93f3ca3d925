"""Factors of chosen and shared experts, and shared experts that are stored one by one."""

import jax.numpy as jnp
import numpy as np

from models.layers.scored_shared_experts import SharedSigmoidTopK, packed_shared_rules
from models.weight_rule import Source, WeightRule


def test_chosen_and_shared_experts_have_weights_of_one_sum():
    scores_np = np.array([[2.0, -1.0, 0.5, 1.0, 0.0]], np.float32)
    bias_np = np.array([0.0, 9.0, 0.0], np.float32)
    choose = SharedSigmoidTopK(top_k=2, num_shared=2, factor=3.0)
    routing, shared = choose(*map(jnp.asarray, (scores_np, bias_np)), jnp.array([0.5]))
    # The bias makes expert 1 the first choice, and its weight does not contain the bias.
    np.testing.assert_array_equal(routing.expert_ids, [[1, 0]])
    likely = 1 / (1 + np.exp(-scores_np[0, [1, 0, 3, 4]]))
    expected = 1.5 * likely / likely.sum()
    np.testing.assert_allclose(routing.weights[0], expected[:2], rtol=1e-6)
    np.testing.assert_allclose(shared[0], expected[2:], rtol=1e-6)


def test_stored_shared_experts_become_one_mlp():
    name = "layers.0.mlp.shared_experts."
    shapes = {"up_proj": (6, 4), "down_proj": (4, 6)}
    rules = {
        f"{name}{local}.kernel": WeightRule(
            sources=(Source(name=f"model.{name}{local}.weight", shape=shape),),
            layout="matrix",
            axes=(None, None),
        )
        for local, shape in shapes.items()
    }
    rules = packed_shared_rules(rules, num_shared=2)
    rng = np.random.default_rng(0)
    up_np, down_np = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 4, 3))
    x_np = rng.standard_normal(4)
    joined = {}
    for local, stored_np in (("up_proj", up_np), ("down_proj", down_np)):
        rule = rules[f"{name}{local}.kernel"]
        assert rule.sources == (Source(name=f"model.{name}{local}", shape=stored_np.shape),)
        joined[local] = rule.combined([stored_np])
    expected = sum(down @ (up @ x_np) ** 2 for up, down in zip(up_np, down_np, strict=True))
    found = joined["down_proj"] @ (joined["up_proj"] @ x_np) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-6)

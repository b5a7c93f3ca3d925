"""A router whose state is passed from layer to layer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.chained_router import ChainedRouter
from models.layers.routing_rules import ScaledCorrectedSoftmaxTopK

HIDDEN, WIDTH, NUM_CHOICES, EPS = 6, 4, 3, 1e-5


def test_state_is_the_scaled_state_of_the_layer_before_and_a_projection():
    router = ChainedRouter(HIDDEN, WIDTH, NUM_CHOICES, eps=EPS, dtype=jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    state = nnx.state(router)
    weights = {path: rng.normal(size=p.get_value().shape) for path, p in nnx.to_flat_state(state)}
    for path, param in nnx.to_flat_state(state):
        param.set_value(jnp.asarray(weights[path], jnp.float32))
    nnx.update(router, state)
    by_name = {".".join(map(str, path)): value for path, value in weights.items()}
    x, previous = rng.normal(size=(5, HIDDEN)), rng.normal(size=(5, WIDTH))

    rule = ScaledCorrectedSoftmaxTopK(top_k=1, factor=1.0)
    route = jax.jit(lambda x, previous: router.route(x, previous, rule))
    routing, got = route(x.astype(np.float32), previous.astype(np.float32))

    own = x @ by_name["down_proj.kernel"] + by_name["down_proj.bias"]
    wanted = own + previous * by_name["router_states_scale.scale"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    inner = wanted / np.sqrt((wanted**2).mean(axis=1, keepdims=True) + EPS)
    inner = inner * by_name["router_mlp.norm.scale"]
    for name in ("fc1", "fc2"):
        inner = inner @ by_name[f"router_mlp.{name}.kernel"] + by_name[f"router_mlp.{name}.bias"]
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    scores = np.exp(inner @ by_name["router_mlp.out_proj.kernel"])
    shares = scores / scores.sum(axis=1, keepdims=True)
    chosen = (shares + by_name["correction_bias"]).argmax(axis=1)
    np.testing.assert_array_equal(routing.expert_ids[:, 0], chosen)
    assert len(set(chosen.tolist())) > 1
    np.testing.assert_allclose(routing.weights[:, 0], shares[range(5), chosen], rtol=1e-5)

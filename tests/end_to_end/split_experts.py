"""Checks a layer of which each device has whole experts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from models.decoders.chosen_layer import choose_layer
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.routing import Routing
from paxkv.runner.memory.device_mesh import find_mesh
from tests.models.layers.test_experts import make_experts
from tests.models.layers.test_layer_stack import put_in_stacks
from tests.models.plain_context import plain_context
from tests.quick_compile import QUICK_COMPILE


def check_own_experts(num_devices: int) -> None:
    """A layer whose devices have whole experts computes what one device computes."""
    experts, rng = make_experts(use_bias=True), np.random.default_rng(0)
    in_stacks = [make_experts(use_bias=True, seed=seed) for seed in (1, 0)]
    put_in_stacks(in_stacks)
    x = jnp.asarray(rng.standard_normal((7, experts.gate_proj.kernel.shape[1])), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (7, 2)), jnp.float32)
    context = plain_context(7)
    kernels = dataclasses.replace(
        KernelSettings.for_mesh(find_mesh(num_devices)), splits_experts=True
    )
    split = dataclasses.replace(context, kernels=kernels)

    def program(layer: Experts, context: LayerContext) -> Callable[..., jax.Array]:
        return jax.jit(
            lambda x, routing: layer(x, routing, context), compiler_options=QUICK_COMPILE
        )

    run_alone = program(experts, context)
    programs = [program(same, split) for same in (experts, choose_layer(in_stacks, jnp.int32(1)))]
    # Experts 2 and 3 are on the last two of four devices. In the second case, all choose them.
    for expert_ids in (rng.integers(0, 4, (7, 2)), [[2, 3]] * 7):
        routing = Routing(jnp.asarray(expert_ids, jnp.int32), weights)
        alone = run_alone(x, routing)
        for run in programs:
            np.testing.assert_allclose(run(x, routing), alone, rtol=1e-5, atol=1e-5)

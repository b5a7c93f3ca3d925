"""Steps and bursts that verify drafts, compiled for a TPU v6e: the cache stays in place."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from models.platforms import TPU
from models.weight_rule import MODEL_AXIS
from tests.aot.step_programs import (
    NUM_LAYERS,
    build_head,
    build_model,
    drafting_burst,
    head_burst,
    verifying_step,
)
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu

COMPILES_SAMPLER = True
pytestmark = pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))


def make_head_burst(folder, model, mesh):
    return head_burst(model, build_head(folder, model), mesh)


# A head's layer computes the tokens of a step, and in another loop one draft at a time.
@pytest.mark.parametrize(
    ("make", "num_layer_calls"),
    [
        (lambda _, model, mesh: verifying_step(model, mesh), NUM_LAYERS),
        (lambda _, model, mesh: drafting_burst(model, mesh), NUM_LAYERS),
        pytest.param(make_head_burst, NUM_LAYERS + 2, marks=pytest.mark.slow),
    ],
    ids=["step", "burst", "head_burst"],
)
def test_verification_keeps_the_cache_in_place(tmp_path, make, num_layer_calls):
    tpu = describe_tpu("v6e:2x2")
    mesh = Mesh(np.array([tpu.device]), (MODEL_AXIS,))
    step = make(tmp_path, build_model(tmp_path, "llama", platform=TPU()), mesh)
    args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), step.args)
    program = tpu.compile(step.function, *args, donate_argnums=step.donate_argnums)
    # Those in the loop of a burst count once.
    assert sorted(program.mosaic_kernels) == sorted(
        ["kv_scatter", "paged_attention_ragged"] * num_layer_calls
    )
    assert program.memory.alias_size_in_bytes >= step.cache_bytes
    assert program.buffers_of(step.row_bytes) == []
    assert program.memory.temp_size_in_bytes < step.row_bytes

"""Steps and bursts that verify drafts, compiled for a TPU v6e: the cache stays in place."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from models.platforms import TPU
from models.weight_rule import MODEL_AXIS
from tests.aot.step_programs import NUM_LAYERS, build_model, drafting_burst, verifying_step
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu

pytestmark = pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))


@pytest.mark.parametrize("make", [verifying_step, drafting_burst], ids=["step", "burst"])
def test_verification_keeps_the_cache_in_place(tmp_path, make):
    tpu = describe_tpu("v6e:2x2")
    mesh = Mesh(np.array([tpu.device]), (MODEL_AXIS,))
    step = make(build_model(tmp_path, "llama", platform=TPU()), mesh)
    args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), step.args)
    program = tpu.compile(step.function, *args, donate_argnums=step.donate_argnums)
    # Those in the loop of a burst count once.
    assert sorted(program.mosaic_kernels) == sorted(
        ["kv_scatter", "paged_attention_ragged"] * NUM_LAYERS
    )
    assert program.memory.alias_size_in_bytes >= step.cache_bytes
    assert program.buffers_of(step.row_bytes) == []
    assert program.memory.temp_size_in_bytes < step.row_bytes

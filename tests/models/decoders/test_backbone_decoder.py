"""Residual streams of decoders whose layers have only a recurrent mixer."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.backbone_decoder import BackboneDecoder
from models.registry import read_config
from tests import on_device
from tests.models.plain_context import plain_context

HF_CONFIG = {
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 3,
    "hidden_size": 2,
    "num_hidden_layers": 4,
}


class Half(nnx.Module):
    """A mixer whose output is 0.5 for every token."""

    def __call__(self, hidden, pages, context, *, norm):
        assert norm(hidden).dtype == jnp.bfloat16
        return on_device.full(hidden.shape, 0.5, jnp.bfloat16), pages

    def project_out(self, attended, context):
        return attended


@pytest.mark.parametrize(("residual_in_fp32", "wanted"), [(True, 258.0), (False, 256.0)])
def test_residual_stream_is_float32_if_config_json_says_so(residual_in_fp32, wanted):
    config = read_config(HF_CONFIG | {"residual_in_fp32": residual_in_fp32})
    assert config.residual_in_fp32 == residual_in_fp32
    model = BackboneDecoder(
        config,
        mixer=Half,
        eps=1e-5,
        residual_in_fp32=residual_in_fp32,
        has_head_kernel=False,
        dtype=jnp.bfloat16,
    )
    model.embed_tokens.embedding[...] = on_device.full((3, 2), 256.0, jnp.bfloat16)
    context = plain_context()
    carry = model.embed(context)
    for layer in model.layers:
        carry, _ = layer(carry, None, context)
    # In bfloat16, 256.5 is 256.
    np.testing.assert_array_equal(carry.hidden.astype(jnp.float32), [[wanted, wanted]])
    assert model.finish(carry).dtype == jnp.bfloat16

"""Vocabulary heads with a bias."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import KernelSettings
from models.decoders.biased_head import BiasedHeadDecoder
from models.layers.rms_norm import UnscaledRMSNorm
from models.registry import read_config
from tests import on_device

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 3,
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}


def test_bias_is_added_to_logits_and_stored_with_the_head():
    model = BiasedHeadDecoder(
        read_config(HF_CONFIG),
        layers=[nnx.Module()],
        norm=UnscaledRMSNorm(eps=1e-6),
        dtype=jnp.float32,
    )
    model.lm_head.kernel[...] = on_device.array([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    model.lm_head.bias[...] = on_device.array([0.5, 0.0, -1.0])
    np.testing.assert_allclose(
        model.compute_logits(on_device.array([[1.0, 10.0]]), KernelSettings()), [[1.5, 2.0, 12.0]]
    )
    rules = model.weight_rules()
    assert rules["lm_head.bias"].sources[0].name == "lm_head.bias"
    assert rules["lm_head.bias"].axes == ("vocab",)

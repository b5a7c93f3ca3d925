"""AltUp equals that of transformers, and streams are scaled to the magnitude of the first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.altup import AltUp, with_magnitude_of
from tests import on_device
from tests.models.plain_context import plain_context


def test_prediction_and_correction_equal_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    configuration = pytest.importorskip("transformers.models.gemma3n.configuration_gemma3n")
    config = configuration.Gemma3nTextConfig(
        hidden_size=8, altup_num_inputs=3, altup_active_idx=1, num_attention_heads=2
    )
    theirs = modeling.Gemma3nTextAltUp(config).eval()
    ours = AltUp(8, 3, active_idx=1, eps=config.rms_norm_eps, dtype=jnp.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("modality_router", "prediction_coefs", "correction_coefs"):
            weight = getattr(theirs, name).weight
            weight.copy_(torch.randn(weight.shape, generator=generator))
            getattr(ours, name).kernel[...] = on_device.array(weight.numpy().T)
        theirs.router_norm.weight.copy_(torch.rand(8, generator=generator) + 0.5)
        ours.router_norm.scale[...] = on_device.array(theirs.router_norm.weight.numpy())
        streams = torch.randn(3, 1, 5, 8, generator=generator)
        computed = torch.randn(1, 5, 8, generator=generator)
        predictions = theirs.predict(streams)
        corrected = theirs.correct(predictions, computed)
    context = plain_context(5)
    predict, correct = (
        jax.jit(functools.partial(each, context=context)) for each in (ours.predict, ours.correct)
    )
    got = predict(streams[:, 0].numpy().swapaxes(0, 1))
    np.testing.assert_allclose(got, predictions[:, 0].numpy().swapaxes(0, 1), atol=1e-5)
    got = correct(got, computed[0].numpy())
    np.testing.assert_allclose(got, corrected[:, 0].numpy().swapaxes(0, 1), atol=1e-5)


def test_magnitude_by_hand():
    x, target = on_device.array([[3.0, 4.0], [0.0, 0.0]]), on_device.array([[6.0, 8.0], [1.0, 1.0]])
    np.testing.assert_allclose(with_magnitude_of(x, target), [[6.0, 8.0], [0.0, 0.0]], rtol=1e-6)

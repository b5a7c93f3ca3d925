"""xIELU equals that of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.xielu import Xielu, XieluMLP


def test_activation_equals_that_of_transformers():
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.XIELUActivation(dtype=torch.float32)
    with torch.no_grad():
        theirs.alpha_p.fill_(0.3)
        theirs.alpha_n.fill_(-0.7)
    ours = Xielu(dtype=jnp.float32)
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        value = getattr(theirs, name).detach().numpy()
        getattr(ours, name)[...] = jnp.asarray(value.reshape(1))
    x_np = np.array([[-30.0, -1.5, -1e-7, 0.0, 1e-7, 2.5]], np.float32)
    wanted = theirs._xielu_python(torch.from_numpy(x_np)).detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(x_np)), wanted, rtol=1e-5, atol=1e-9)


def test_numbers_of_a_checkpoint_become_vectors():
    rules = XieluMLP(2, 2, activation="silu", dtype=jnp.float32).act_fn.weight_rules("act_fn")
    assert rules["beta"].sources[0].shape == ()
    assert rules["beta"].combined([np.array(0.5)]).tolist() == [0.5]
    assert rules["alpha_p"].combined([np.array([0.5])]).tolist() == [0.5]

"""Every parameter of every family has a sharding by name, and it fits its shape."""

import pytest
from jax.sharding import PartitionSpec

from models import load_model
from models.errors import ModelError
from models.param_sharding import param_spec
from tests.oracles.recipes import write_recipe


@pytest.mark.parametrize("recipe", ["llama_biases", "llama_tied", "qwen2", "qwen3", "gemma3"])
def test_every_parameter_is_split_along_axes_it_has(tmp_path, recipe) -> None:
    model = load_model(write_recipe(tmp_path / recipe, recipe), dtype="float32")
    for name, param, spec in zip(model.param_names, model.params, model.param_specs, strict=True):
        assert len(spec) in (0, param.ndim), name
        # Two devices would each get a whole part.
        assert all(
            axis is None or size % 2 == 0 for axis, size in zip(spec, param.shape, strict=False)
        )


def test_attention_and_mlp_need_one_sum_each() -> None:
    # What is split by outputs is followed by what is split by inputs.
    out, into = PartitionSpec(None, "model"), PartitionSpec("model", None)
    assert param_spec("layers.0.self_attn.q_proj.kernel") == out
    assert param_spec("layers.0.self_attn.o_proj.kernel") == into
    assert param_spec("layers.0.mlp.up_proj.kernel") == out
    assert param_spec("layers.0.mlp.down_proj.kernel") == into
    # A bias after the sum is added once, by everyone.
    assert param_spec("layers.0.self_attn.o_proj.bias") == PartitionSpec()


def test_panels_of_a_kernel_are_whole_on_every_device() -> None:
    assert param_spec("layers.0.mlp.up_proj.kernel.12") == PartitionSpec()


def test_kernels_that_are_turned_are_split_along_the_same_features() -> None:
    out, into = PartitionSpec("model", None), PartitionSpec(None, "model")
    assert param_spec("layers.0.mlp.up_proj.kernel", is_transposed=True) == out
    assert param_spec("layers.0.mlp.down_proj.kernel", is_transposed=True) == into


def test_unknown_parameter_needs_a_rule() -> None:
    with pytest.raises(ModelError, match="router"):
        param_spec("layers.0.mlp.router.kernel")

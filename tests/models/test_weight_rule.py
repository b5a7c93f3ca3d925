"""Every parameter has a rule: where it comes from, and how it is split over devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from models import LoadedModel, load_model
from models.errors import ModelError
from models.families.llama import LlamaForCausalLM
from models.head_split import HeadRange, HeadSplit
from models.platforms import CPU
from models.registry import FAMILIES
from models.weight_rule import Source, SplitAxis, WeightRule, split_spec, with_stored_names
from paxkv.runner.memory.device_mesh import device_mesh
from tests.models.steppers import checkpoint_folder, model_of
from tests.oracles.recipes import write_recipe


@pytest.mark.parametrize("recipe", ["llama_biases", "llama_tied", "qwen2", "qwen3", "gemma3"])
def test_every_parameter_is_split_along_axes_it_has(tmp_path, recipe) -> None:
    model = load_model(write_recipe(tmp_path / recipe, recipe), dtype="float32")
    for name, param, spec in zip(model.param_names, model.params, model.param_specs, strict=True):
        assert len(spec) in (0, param.ndim), name
        # Two devices can share the axis equally.
        assert all(
            axis is None or size % 2 == 0 for axis, size in zip(spec, param.shape, strict=False)
        )


def spec_of(name: str, model: LoadedModel | None = None) -> PartitionSpec:
    model = model or model_of("llama_biases")
    return model.param_specs[model.param_names.index(name)]


def test_attention_and_mlp_need_one_sum_each() -> None:
    # A layer that is split by outputs is followed by one that is split by inputs.
    out, into = PartitionSpec(None, "model"), PartitionSpec("model", None)
    assert spec_of("layers.0.self_attn.q_proj.kernel") == out
    assert spec_of("layers.0.self_attn.o_proj.kernel") == into
    assert spec_of("layers.0.mlp.up_proj.kernel") == out
    assert spec_of("layers.0.mlp.down_proj.kernel") == into
    assert spec_of("layers.0.self_attn.q_proj.bias") == PartitionSpec("model")
    # The bias after the sum is whole on each device, and added once.
    assert spec_of("layers.0.self_attn.o_proj.bias") == PartitionSpec()
    assert spec_of("layers.0.input_layernorm.scale") == PartitionSpec()


def test_kernels_that_are_turned_are_split_along_the_same_features() -> None:
    out, into = PartitionSpec("model", None), PartitionSpec(None, "model")
    model = load_model(checkpoint_folder("llama_biases"), product_dtype="int8")
    assert spec_of("layers.0.mlp.up_proj.kernel.numbers", model) == out
    assert spec_of("layers.0.mlp.down_proj.kernel.numbers", model) == into
    assert spec_of("layers.0.mlp.up_proj.kernel.scales", model) == PartitionSpec("model")
    assert spec_of("layers.0.mlp.down_proj.kernel.scales", model) == PartitionSpec()


@pytest.mark.parametrize(
    ("param_name", "source", "layout"),
    [
        ("layers.0.mlp.up_proj.kernel", "model.layers.0.mlp.up_proj.weight", "matrix"),
        ("layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.bias", "vector"),
        ("embed_tokens.embedding", "model.embed_tokens.weight", "table"),
        ("norm.scale", "model.norm.weight", "vector"),
        ("lm_head.kernel", "lm_head.weight", "matrix"),
    ],
)
def test_parameter_finds_its_weight(param_name, source, layout):
    model = model_of("llama_biases")
    rule = model.weight_rules[param_name]
    shape = model.params[model.param_names.index(param_name)].shape
    # A matrix is stored [out, in].
    stored = shape[::-1] if layout == "matrix" else shape
    assert (rule.sources, rule.layout) == ((Source(name=source, shape=stored),), layout)


def test_a_matrix_with_an_axis_of_experts_is_refused():
    with pytest.raises(ModelError, match="a matrix has 2 axes"):
        WeightRule(sources=(), layout="matrix", axes=(None, None, "inner"))


def test_several_sources_need_a_function_that_combines_them():
    sources = tuple(Source(name=name, shape=(2,)) for name in "ab")
    with pytest.raises(ModelError, match=r"without `combine` has 2 sources \(a, b\); expected one"):
        WeightRule(sources=sources, layout="vector", axes=(None,))


def test_a_mesh_splits_all_named_axes_but_experts():
    assert split_spec(("experts", None, "inner")) == PartitionSpec(None, None, "model")
    assert split_spec(("experts", None)) == PartitionSpec()


def test_a_mesh_leaves_axes_whole_that_it_cannot_split() -> None:
    source = Source(name="w", shape=(8, 6))

    def axes_on(num_devices: int, *axes: SplitAxis | None, splits_kv_heads: bool = True) -> object:
        rule = WeightRule(sources=(source,), layout="matrix", axes=axes)
        return rule.on_mesh((6, 8), num_devices, splits_kv_heads=splits_kv_heads).axes

    assert axes_on(2, "inner", None) == ("inner", None)
    # A vocabulary has any size.
    assert axes_on(4, None, "vocab") == (None, "vocab")
    assert axes_on(4, "vocab", None) == (None, None)
    assert axes_on(4, None, "kv_heads") == (None, "kv_heads")
    assert axes_on(4, None, "kv_heads", splits_kv_heads=False) == (None, None)
    with pytest.raises(ModelError, match="w has 6 entries along the axis 'inner'.* 4 devices"):
        axes_on(4, "inner", None)


def test_a_mesh_orders_heads_by_device() -> None:
    heads = HeadSplit(
        ranges=(HeadRange(num_heads=4, head_dim=1), HeadRange(num_heads=1, head_dim=2)),
        heads_of_layer=(4, 1),
    )
    rule = WeightRule(
        sources=(Source(name="w", shape=(6, 3)),), layout="matrix", axes=(None, None), heads=heads
    )
    weight_np = np.arange(18).reshape(6, 3)
    own = rule.on_mesh((3, 6), 2, splits_kv_heads=True)
    assert split_spec(own.axes) == PartitionSpec(None, "model")
    # All devices have the last two outputs.
    np.testing.assert_array_equal(own.combined([weight_np]), weight_np[[0, 1, 4, 5, 2, 3, 4, 5]])
    assert (own.shape_on_mesh((3, 6)), own.whole_shape((3, 8))) == ((3, 8), (3, 6))
    whole = rule.on_mesh((3, 6), 3, splits_kv_heads=True)
    assert whole == rule
    np.testing.assert_array_equal(whole.combined([weight_np]), weight_np)


def test_with_expert_parallelism_a_device_has_whole_experts() -> None:
    rule = WeightRule(
        sources=(Source(name="w", shape=(6, 8)),), layout="table", axes=("experts", "inner")
    )
    own = rule.on_mesh((6, 8), 3, splits_kv_heads=True, splits_experts=True)
    assert split_spec(own.axes) == PartitionSpec("model", None)
    parts = rule.on_mesh((6, 8), 2, splits_kv_heads=True)
    assert split_spec(parts.axes) == PartitionSpec(None, "model")
    with pytest.raises(ModelError, match="w has 6 entries along the axis 'own_experts'"):
        rule.on_mesh((6, 8), 4, splits_kv_heads=True, splits_experts=True)


def test_expert_parallelism_needs_experts(tmp_path) -> None:
    folder = write_recipe(tmp_path, "llama")
    with pytest.raises(ModelError, match="no layer of LlamaForCausalLM has experts"):
        load_model(folder, mesh=device_mesh(jax.devices()[0]), enable_expert_parallel=True)


@pytest.mark.parametrize("panel_width", [None, 64])
def test_a_tied_head_is_the_embedding(tmp_path, panel_width):
    platform = CPU(num_threads=2, instruction_sets=frozenset({"avx2"}))
    folder = write_recipe(tmp_path, "llama_tied")
    rules = load_model(folder, platform=platform, panel_width=panel_width).weight_rules
    assert ("lm_head.kernel" in rules) == (panel_width is not None)
    if panel_width is None:
        rule = rules["embed_tokens.embedding"]
        assert (rule.layout, rule.axes) == ("turned_table", (None, "vocab"))
    else:
        (source,) = rules["lm_head.kernel"].sources
        assert source.name == "model.embed_tokens.weight"


def test_sources_are_combined():
    first, second = Source(name="a", shape=(2,)), Source(name="b", shape=(3,))
    rule = WeightRule(
        sources=(first, second), layout="vector", axes=(None,), combine=np.concatenate
    )
    assert rule.combined([np.zeros(2), np.ones(3)]).tolist() == [0, 0, 1, 1, 1]


def test_parts_of_stored_names_are_replaced_in_turn():
    source = Source(name="model.layers.0.self_attn.o_proj.weight", shape=(2, 2))
    rules = {"w": WeightRule(sources=(source,), layout="matrix", axes=(None, None))}
    parts = {".self_attn.o_proj.": ".self_attn.dense.", ".self_attn.": ".attn."}
    (stored,) = with_stored_names(rules, parts)["w"].sources
    assert stored.name == "model.layers.0.attn.dense.weight"


def test_only_kernels_of_linear_are_matrices(tmp_path, monkeypatch):
    """No other layer can multiply with a kernel that was rounded or lies in panels."""
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:LlamaWithOwnMatrix")
    with pytest.raises(ModelError, match="'own.kernel' has the layout 'matrix'.*Use a `Linear`"):
        load_model(write_recipe(tmp_path, "llama"), load_format="dummy")


def test_a_rule_for_no_parameter_is_refused(tmp_path, monkeypatch):
    """Else the parameter that was meant is loaded by its layer's own rule."""
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:LlamaWithMisspeltRule")
    with pytest.raises(ModelError, match="rules for layers.0.mlp.up.kernel, which are not param"):
        load_model(write_recipe(tmp_path, "llama"))


class LlamaWithMisspeltRule(LlamaForCausalLM):
    """It means "up_proj"."""

    def weight_rules(self):
        rules = super().weight_rules()
        turned = dataclasses.replace(
            rules["layers.0.mlp.up_proj.kernel"], combine=lambda arrays: arrays[0][::-1]
        )
        return rules | {"layers.0.mlp.up.kernel": turned}


class OwnMatrix(nnx.Module):
    """A parameter of two axes outside `Linear`."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((2, 2)))

    def weight_rules(self, name):
        source = Source(name=f"{name}.weight", shape=(2, 2))
        return {"kernel": WeightRule(sources=(source,), layout="matrix", axes=(None, None))}


class LlamaWithOwnMatrix(LlamaForCausalLM):
    """A family with such a layer."""

    def __init__(self, config, *, has_head_kernel, dtype):
        super().__init__(config, has_head_kernel=has_head_kernel, dtype=dtype)
        self.own = OwnMatrix()


def test_a_family_may_store_parameters_packed(tmp_path, monkeypatch):
    """Gate and up lie in one tensor of the checkpoint, and k is the sum of two."""
    folder = write_recipe(tmp_path / "packed", "llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    plain = load_model(folder, dtype="float32")
    repacked = {}
    for name, weight in weights.items():
        if name.endswith("mlp.gate_proj.weight"):
            up = weights[name.replace("gate", "up")]
            repacked[name.replace("gate", "gate_up")] = np.concatenate([weight, up])
        elif name.endswith("k_proj.weight"):
            repacked |= {f"{name}.half": weight / 2, f"{name}.other": weight / 2}
        elif not name.endswith("mlp.up_proj.weight"):
            repacked[name] = weight
    save_file(repacked, path)
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:PackedLlama")
    packed = load_model(folder, dtype="float32")
    assert packed.param_names == plain.param_names
    for got, wanted in zip(packed.params, plain.params, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert packed.param_specs == plain.param_specs


class PackedLlama(LlamaForCausalLM):
    """Rules as a family with packed checkpoints has them."""

    def weight_rules(self):
        rules = super().weight_rules()
        for name, rule in rules.items():
            (source,) = rule.sources
            size = source.shape[0]
            if ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
                packed_name = re.sub(r"(gate|up)_proj", "gate_up_proj", source.name)
                packed = Source(name=packed_name, shape=(2 * size, source.shape[1]))
                start = 0 if "gate_proj" in name else size
                rows = slice(start, start + size)
                rules[name] = dataclasses.replace(
                    rule, sources=(packed,), combine=lambda arrays, rows=rows: arrays[0][rows]
                )
            elif ".k_proj." in name:
                halves = [
                    dataclasses.replace(source, name=f"{source.name}.{part}")
                    for part in ("half", "other")
                ]
                rules[name] = dataclasses.replace(rule, sources=tuple(halves), combine=sum)
        return rules

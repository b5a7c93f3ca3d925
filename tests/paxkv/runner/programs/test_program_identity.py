"""Whatever a program depends on is in its identity, under a name that a user understands."""

import dataclasses
import json

import jax
import pytest

from models import AttentionFormat, KernelSettings, Platform, read_config
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.memory.device_mesh import device_mesh
from paxkv.runner.memory.kv_cache_arrays import abstract_kv_cache
from paxkv.runner.programs.program_identity import (
    identity_differences,
    identity_digest,
    program_identity,
)
from paxkv.runner.shapes.step_variant import StepVariant
from tests.models.cache.formats_of_tests import IndexFormat
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, TinyModel

PLACES = "places in the KV cache"


def make_identity(
    *,
    model: TinyModel | None = None,
    num_blocks: int = 9,
    block_size: int = 8,
    kv_dtype: str = "float32",
    max_num_seqs: int = 2,
    num_logits_rows: int = 2,
    compiler_options: dict[str, str] | None = None,
    feature_code: tuple[StepVariant, ...] = (),
    head: TinyModel | None = None,
) -> dict[str, str]:
    mesh = device_mesh(jax.devices()[0])
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=NUM_HEADS, head_size=HEAD_DIM, dtype=kv_dtype
    )
    group = KVCacheGroupSpec(layer_names=("a", "b"), kv_cache_spec=spec)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=(group,))
    model = model or TinyModel()
    return program_identity(
        model=model,
        params=model.params,
        kv_cache=abstract_kv_cache(config, mesh, Platform(), kv_dtype),
        mesh=mesh,
        max_num_seqs=max_num_seqs,
        num_logits_rows=num_logits_rows,
        compiler_options=compiler_options or {},
        feature_code=feature_code,
        head=head,
    )


def test_identity_is_the_same_whatever_the_weights_are():
    identity = make_identity(model=TinyModel(seed=1))
    assert identity == make_identity(model=TinyModel(seed=2))
    assert identity_digest(identity) == identity_digest(make_identity())
    assert identity_differences(identity, make_identity()) == []
    assert all(type(value) is str for value in identity.values())


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"model": TinyModel(windows=(None, 4))}, {"model's attention", PLACES}),
        ({"model": TinyModel(dtype="bfloat16")}, {"dtype", "weights"}),
        ({"num_blocks": 10}, {"number of KV blocks"}),
        ({"block_size": 16}, {"KV cache"}),
        ({"kv_dtype": "bfloat16"}, {"KV cache"}),
        ({"max_num_seqs": 3}, {"max_num_seqs"}),
        ({"num_logits_rows": 8}, {"rows of logits"}),
        ({"compiler_options": {"xla_x": "1"}}, {"compiler options"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_change_is_seen_and_named(changed, names):
    identity, other = make_identity(), make_identity(**changed)
    assert {name for name in identity if identity[name] != other.get(name)} == names
    assert identity_digest(identity) != identity_digest(other)
    assert len(identity_differences(identity, other)) == len(names)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        (TinyModel(windows=(None, 4)), {"config", "places in the KV cache"}),
        (TinyModel(dtype="bfloat16"), {"weights"}),
        (None, {"class", "config", "weights", "places in the KV cache"}),
    ],
    ids=["layers", "dtype", "none"],
)
def test_another_draft_head_is_seen_and_named(head, names):
    identity, other = make_identity(head=TinyModel(seed=1)), make_identity(head=head)
    assert {n for n in identity if identity[n] != other.get(n)} == {
        f"draft head's {name}" for name in names
    }


def moved(model: TinyModel, **changes: object) -> TinyModel:
    """With the cache of its last layer elsewhere, or in another format."""
    *others, ((name, place),) = model.places
    return model.with_places([*others, ((name, dataclasses.replace(place, **changes)),)])


@pytest.mark.parametrize(
    "changes",
    [
        {"row": 0},
        {"group_idx": 1},
        {"inputs_idx": 1},
        {"format": AttentionFormat(num_kv_heads=NUM_HEADS, head_dim=8, dtype="float32")},
        # 16 bits in the same pages: nothing else differs between these two.
        {"format": AttentionFormat(num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype="float16")},
    ],
    ids=str,
)
def test_places_of_caches_are_in_the_identity(changes):
    (difference,) = identity_differences(
        make_identity(), make_identity(model=moved(TinyModel(), **changes))
    )
    assert difference.startswith(f"{PLACES}: compiled with")


def test_the_source_of_a_family_from_another_package_counts():
    model = TinyModel()
    model.packages = frozenset({"models", "tests"})
    (difference,) = identity_differences(make_identity(), make_identity(model=model))
    assert difference.startswith("paxkv: compiled with")


def test_two_classes_of_one_file_have_programs_of_their_own():
    model = TinyModel()
    model.class_name = "tests.OtherModel"
    (difference,) = identity_differences(make_identity(), make_identity(model=model))
    assert difference == ("model's class: compiled with 'tests.TinyModel', now 'tests.OtherModel'")


class ForeignVariant(StepVariant):
    """A step feature of another package."""


def test_the_source_of_a_step_feature_from_another_package_counts():
    ours = PromptLogprobsVariant(num_logits=0)
    assert make_identity(feature_code=(ours,)) == make_identity()
    foreign = make_identity(feature_code=(ours, ForeignVariant()))
    (difference,) = identity_differences(make_identity(), foreign)
    assert difference.startswith("paxkv: compiled with")


def test_the_source_of_a_cache_format_from_another_package_counts():
    foreign = make_identity(model=moved(TinyModel(), format=IndexFormat(width=8, dtype="float32")))
    differences = identity_differences(make_identity(), foreign)
    assert {text.partition(":")[0] for text in differences} == {PLACES, "paxkv"}


def test_ending_tokens_are_not_in_the_identity():
    configs = [
        read_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 100,
                "hidden_size": 64,
                "intermediate_size": vary,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
                "eos_token_id": eos,
            }
        )
        for vary, eos in ((64, 2), (64, [2, 5]), (128, 2))
    ]
    models = [TinyModel() for _ in configs]
    for model, config in zip(models, configs, strict=True):
        model.config = config
    first, second, third = (make_identity(model=model) for model in models)
    assert first == second
    assert [text.partition(":")[0] for text in identity_differences(first, third)] == [
        "model's intermediate_size"
    ]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KernelSettings)])
def test_every_setting_of_the_kernels_counts(field):
    if field == "mesh":
        assert json.loads(make_identity()["mesh"]) == {"model": 1}
        return
    model = TinyModel()
    model.kernels = dataclasses.replace(model.kernels, **{field: "another"})
    (difference,) = identity_differences(make_identity(), make_identity(model=model))
    assert difference.startswith(f"kernels' {field}: ") and difference.endswith("now 'another'")


def test_versions_device_and_compiler_settings_count(monkeypatch):
    identity = make_identity()
    assert identity["jax"] == jax.__version__
    assert identity["platform"] == "cpu" and identity["processor"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with jax.default_matmul_precision("float32"):
        differences = identity_differences(identity, make_identity())
    assert [text.partition(":")[0] for text in differences] == [
        "jax_default_matmul_precision",
        "XLA_FLAGS",
    ]
    assert "now '--xla_cpu_enable_fast_math=true'" in differences[1]


@pytest.mark.parametrize(
    "setting", ["jax_disable_most_optimizations", "jax_compiler_enable_remat_pass"]
)
def test_settings_that_jax_passes_to_the_compiler_count(setting):
    identity, before = make_identity(), jax.config.values[setting]
    jax.config.update(setting, not before)
    try:
        differences = identity_differences(identity, make_identity())
    finally:
        jax.config.update(setting, before)
    assert differences == [f"{setting}: compiled with '{before}', now '{not before}'"]


def test_differences_name_both_values_and_what_only_one_has():
    assert identity_differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "b: compiled with '2', now '3'",
        "c: compiled with 'none', now '4'",
        "a: compiled with '1', now 'none'",
    ]

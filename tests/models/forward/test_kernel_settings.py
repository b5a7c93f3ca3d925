"""`KernelSettings` splits heads over a mesh without changing any result or moving the cache."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import pallas_kernels
from models import ModelError, load_model
from models.forward.kernel_settings import KernelSettings
from models.weight_rule import MODEL_AXIS
from tests.oracles.make_checkpoint import write_random_checkpoint

# Runs in a process of its own: the number of CPU devices is settled when JAX starts.
COMPARE = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import ForwardBatch, GroupInputs, KernelSettings, load_model
from models.forward.kernel_settings import PAGES_BY_DEVICE
from models.weight_rule import MODEL_AXIS
from tests.oracles.placed_model import place_model

BLOCK_SIZE, NUM_BLOCKS = 8, 300
mesh = Mesh(np.array(jax.devices()), (MODEL_AXIS,))

def run(model, params, batch, cache_np, num_devices, sharding):
    def step(params, pages, batch):
        outputs, pages = model.forward(params, pages, batch)
        pages = model.kernels.copy_blocks(pages, jnp.asarray([[1, 2], [20, NUM_BLOCKS]]))
        return model.compute_logits(params, outputs.for_logits), pages

    # Heads of a device next to each other, with its K and V.
    num_kv_heads = cache_np.shape[3]
    page = cache_np.shape[2:]
    own_heads = num_kv_heads // num_devices
    by_device = cache_np.reshape(*cache_np.shape[:2], 2, num_devices, own_heads, *page[2:])
    by_device = by_device.swapaxes(2, 3)
    pages = jax.device_put(by_device.reshape(*cache_np.shape[:2], -1), sharding)
    compiled = jax.jit(step, donate_argnums=1).lower(params, pages, batch).compile()
    logits, pages = compiled(params, pages, batch)
    pages_np = np.asarray(pages).reshape(by_device.shape).swapaxes(2, 3).reshape(cache_np.shape)
    return compiled, np.asarray(logits), pages_np

def compare(folder, load_format):
    loaded = load_model(folder, load_format=load_format)
    # The reference bodies of ops compile in less time. Heads are split in the same way around all
    # bodies.
    loaded = loaded.with_kernels(KernelSettings(implementation="reference"))
    loaded = place_model(loaded, block_size=BLOCK_SIZE).model
    config = loaded.config
    rng = np.random.default_rng(0)
    layer = config.attention[0]
    # A page is [K | V] of all heads where one device has it, and of its heads on each of several.
    page = (2, layer.num_kv_heads, BLOCK_SIZE, layer.head_dim)
    batch = ForwardBatch(
        token_ids=rng.integers(0, config.vocab_size, 16, np.int32),
        positions=np.array([*range(9), 20, *range(3, 7), 0, 0], np.int32),
        query_start_loc=np.array([0, 9, 10, 14], np.int32),
        groups=(
            GroupInputs(
                block_tables=1 + rng.permutation(12).reshape(1, 3, 4).astype(np.int32),
                seq_lens=np.array([9, 21, 7], np.int32),
                block_size=BLOCK_SIZE,
            ),
        ),
        logits_indices=np.array([8, 9, 13], np.int32),
    )
    cache_np = rng.standard_normal((config.num_layers, NUM_BLOCKS, *page)).astype(np.float32)
    alone = run(loaded, loaded.params, batch, cache_np, 1, None)
    model = place_model(loaded, block_size=BLOCK_SIZE, num_devices=mesh.size).model
    model = model.with_kernels(KernelSettings.for_mesh(mesh, implementation="reference"))
    params = tuple(
        jax.device_put(param, NamedSharding(mesh, spec))
        for param, spec in zip(loaded.params, loaded.param_specs)
    )
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
    sharding = NamedSharding(mesh, PAGES_BY_DEVICE)
    split = run(model, params, batch, cache_np, len(jax.devices()), sharding)
    assert (alone[2][:, 20] != cache_np[:, 20]).any()  # the copy was made
    for one, many in zip(alone[1:], split[1:]):
        np.testing.assert_allclose(one, many, atol=2e-5)
    largest = max(
        (np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(
            r"= f32\\[([0-9,]+)\\]\\S* (?:all-gather|all-to-all)", split[0].as_text())), default=0)
    smallest_array = min([cache_np.size / 8, *(
        param.size / 4 for param in params if param.ndim == 3
    )])
    assert largest < smallest_array, f"gathers {largest}, an array has {smallest_array}"
    assert (alone[1].argmax(-1) == split[1].argmax(-1)).all()
    for param in params:
        if param.ndim == 3:  # experts
            (shape,) = {shard.data.shape for shard in param.addressable_shards}
            assert 4 * np.prod(shape) == param.size and shape[0] == param.shape[0]

for folder, load_format in zip(sys.argv[1::2], sys.argv[2::2]):
    compare(folder, load_format)
    print("same", load_format)
"""
MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    # So that logits are as large as a trained model's, and differences show.
    "initializer_range": 0.2,
}


# The model with experts has a layer without them.
@pytest.mark.parametrize("is_dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_devices_give_the_answer_of_one_and_gather_neither_cache_nor_experts(
    tmp_path, is_dense
):
    if is_dense:
        write_random_checkpoint(tmp_path, num_layers=2, num_kv_heads=4)
    else:
        (tmp_path / "config.json").write_text(json.dumps(MOE_CONFIG))
    load_format = "auto" if is_dense else "dummy"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPARE, str(tmp_path), load_format],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout == f"same {load_format}\n", result.stderr


class FakeMesh:
    shape = {MODEL_AXIS: 8}


def test_settings_that_split_heads_unevenly_are_refused(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=1, num_kv_heads=2))
    with pytest.raises(ModelError, match="4 query heads; expected a multiple"):
        loaded.with_kernels(KernelSettings(mesh=FakeMesh()))


def test_settings_of_a_mesh_know_their_target_and_are_hashable():
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), (MODEL_AXIS,))
    settings = KernelSettings.for_mesh(mesh, implementation="xla")
    assert settings.target == pallas_kernels.target_of(jax.devices("cpu")[0])
    assert (settings.num_shards, settings.implementation) == (1, "xla")
    assert hash(settings) == hash(KernelSettings.for_mesh(mesh, implementation="xla"))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (KernelSettings(), None),
        (KernelSettings(implementation="reference"), "reference"),
        (KernelSettings(implementation="reference", batch_invariant=True), "xla"),
    ],
)
def test_batch_invariant_products_of_quantized_matrices_use_xla(monkeypatch, settings, wanted):
    # The kernel serves few rows only, so a row's bits would depend on the number of rows.
    chosen = []

    def note(*arrays, number_format, implementation, target):
        chosen.append(implementation)

    monkeypatch.setattr(pallas_kernels, "scaled_matmul", note)
    settings.scaled_matmul(None, None, None, None, number_format="int4", split=None)
    assert chosen == [wanted]

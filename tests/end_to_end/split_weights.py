"""Checks that each device has its part of the weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from models import load_model
from models.stored_kernels.scaled import ScaledKernel
from paxkv.runner.memory.device_mesh import find_mesh
from tests.end_to_end.split_configs import CONFIGS
from tests.end_to_end.test_quantized_checkpoints import write_pair
from tests.models.stored_kernels.dequantized import dequantized
from tests.oracles.serving_golden import write_serving_recipe


def check_weights(num_devices: int) -> None:
    """Every device has its part of the weights that a single device has."""
    folder = write_serving_recipe(Path(tempfile.mkdtemp()), "qwen3", bias=True)
    alone = load_model(folder, dtype="float32")
    split = load_model(folder, dtype="float32", mesh=find_mesh(num_devices))
    for name, one, many in zip(alone.param_names, alone.params, split.params, strict=True):
        np.testing.assert_array_equal(one, many, err_msg=name)
        # Norms are whole, and so are keys and values: there are two heads of them.
        is_whole = "norm" in name or "k_proj" in name or "v_proj" in name or "o_proj.bias" in name
        num_parts = 1 if is_whole else num_devices
        sizes = {shard.data.size * num_parts for shard in many.addressable_shards}
        assert sizes == {one.size}, name
        assert len(many.addressable_shards) == num_devices


def check_kept_integers(quant_method: str, num_devices: int) -> None:
    """Devices share the integers of a quantized checkpoint, which stay what they are."""
    folder, _ = write_pair(Path(tempfile.mkdtemp()), quant_method, intermediate_size=128)
    options = {"dtype": "float32", "quantization": "checkpoint"}
    alone, split = (
        load_model(folder, mesh=mesh, **options) for mesh in (None, find_mesh(num_devices))
    )
    num_scaled = 0
    for name, one in alone.parameters.items():
        if isinstance(one, ScaledKernel):
            many = split.parameters[name]
            np.testing.assert_array_equal(dequantized(one), dequantized(many), err_msg=name)
            assert not many.numbers.is_fully_replicated, name
            num_scaled += 1
    assert num_scaled > 0


def check_expert_stacks(num_devices: int, **options: Any) -> None:
    """Devices share the experts of two layers, which are in one array for each projection."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    alone, split = (
        load_model(folder, load_format="dummy", mesh=mesh, **options)
        for mesh in (None, find_mesh(num_devices))
    )
    names = [name for name in split.param_names if name.startswith("stacks.")]
    assert {place.num_layers for place in split.stack_places.values()} == {2}
    assert len(split.stack_places) == 2 * len(names) == 6
    for name in names:
        one, many = (model.parameters[name] for model in (alone, split))
        np.testing.assert_array_equal(one, many, err_msg=name)
        sizes = {shard.data.size * num_devices for shard in many.addressable_shards}
        assert sizes == {one.size}, name

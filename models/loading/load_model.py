"""`load_model`: from a folder or a hub name to a model that is ready to run."""

import dataclasses
import functools
from pathlib import Path
from typing import Literal, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from models.config.model_config import ModelConfig, ModelDtype
from models.config.split_over_devices import check_split
from models.errors import ModelError
from models.loading.check_weights import HEAD_WEIGHT
from models.loading.checkpoint import Checkpoint
from models.loading.gguf import GGUFCheckpoint
from models.loading.kernel_encoder import KernelEncoder, ProductDtype, Quantization
from models.loading.loaded_model import LoadedModel
from models.loading.mistral_files import MistralCheckpoint, has_mistral_files
from models.loading.module_structure import ModuleStructure
from models.loading.quantized import DequantizedCheckpoint
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.loading.source import read_model_config, read_weight_format, resolve_model_folder
from models.loading.tensor_names import name_weights
from models.loading.tied_head import is_head_tied
from models.loading.weight_memory import check_weight_memory
from models.model_impl import AUTO
from models.platforms import Platform, default_platform
from models.platforms.jax_process import check_not_forked
from models.registry import family_class

LoadDtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]


def load_model(
    model: str | Path,
    *,
    dtype: LoadDtype = "auto",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    has_unified_kv: bool = False,
    max_model_len: int | None = None,
    product_dtype: ProductDtype = "auto",
    panel_width: int | None = None,
    quantization: Quantization = "none",
    quantization_group_size: int = 128,
    generation_folder: Path | None = None,
    model_impl: str = AUTO,
    platform: Platform | None = None,
    mesh: Mesh | None = None,
    enable_expert_parallel: bool = False,
) -> LoadedModel:
    """Loads a model onto the default device, or onto the devices of a mesh.

    Args:
        model: A folder in Hugging Face layout, a GGUF file, or a hub name such as
            "Qwen/Qwen3-0.6B".
        dtype: The dtype of loaded weights. "auto" is `Platform.weight_dtype` of the dtype in
            config.json or, if it has none, of most numbers in the checkpoint.
        load_format: "auto" reads safetensors or the GGUF file; "dummy" needs only config.json and
            draws random weights.
        seed: Of the random weights.
        has_unified_kv: Layers with a sliding window keep all keys and values, as the others do.
        max_model_len: Most tokens of a request, for `ModelConfig.for_length`.
        product_dtype: As in `KernelEncoder`.
        panel_width: As in `KernelEncoder`. Several devices have no panels.
        quantization: As in `KernelEncoder`.
        quantization_group_size: `KernelEncoder.group_size`.
        generation_folder: As in `read_model_config`.
        model_impl: As in `models.registry.read_config`.
        platform: What its programs will be compiled for; None is JAX's default device.
        mesh: With the axis `MODEL_AXIS`. Each device gets its own part of every parameter.
        enable_expert_parallel: Each device of the mesh has its own experts, and not a part of each
            expert. It has no effect on one device.

    Raises:
        ModelError: The subclass says whether the model cannot be found, is not supported, or its
            weights do not fit it. `ModelError` itself: an argument is wrong, a device has too
            little free memory, or this process is a fork of a process that loaded a model.
    """
    _check_choice("dtype", dtype, get_args(LoadDtype))
    _check_choice("load_format", load_format, get_args(LoadFormat))
    _check_choice("product_dtype", product_dtype, get_args(ProductDtype))
    _check_choice("quantization", quantization, get_args(Quantization))
    platform = platform or default_platform()
    num_devices = 1 if mesh is None else mesh.size
    encoder = KernelEncoder(
        platform=platform,
        product_dtype=product_dtype,
        panel_width=panel_width if num_devices == 1 else None,
        quantization=quantization,
        group_size=quantization_group_size,
        num_devices=num_devices,
    )
    check_not_forked()
    # A model that is not supported is refused before its weights are downloaded.
    folder = resolve_model_folder(model, with_weights=False)
    config = read_model_config(folder, generation_folder=generation_folder, model_impl=model_impl)
    check_split(config, num_devices)
    if load_format != "dummy":
        folder = resolve_model_folder(model)
    config = dataclasses.replace(config, has_unified_kv=has_unified_kv).for_length(max_model_len)
    files = None if load_format == "dummy" else _open_files(folder)
    if config.dtype is None:
        own_dtype = "float32" if files is None else files.main_dtype
        config = dataclasses.replace(config, dtype=own_dtype)
    dtype = platform.weight_dtype(config.dtype) if dtype == "auto" else dtype
    checkpoint = None if files is None else open_weights(files, dtype)
    if quantization == "checkpoint" and not isinstance(checkpoint, DequantizedCheckpoint):
        raise ModelError(
            f"quantization is 'checkpoint', which keeps the numbers of safetensors files, and "
            f"{folder} has no quantized ones. Use none, int8, int4 or fp8."
        )
    model_class = family_class(config.architecture, model_impl=model_impl)

    def make_structure(config: ModelConfig) -> ModuleStructure:
        return ModuleStructure(
            config,
            make=functools.partial(model_class, config, dtype=jnp.dtype(dtype)),
            dtype=dtype,
            encoder=encoder,
            mesh=mesh,
            splits_experts=enable_expert_parallel and mesh is not None,
        )

    structure = make_structure(config)
    if checkpoint is not None:
        wanted = [*structure.source_names, HEAD_WEIGHT]
        name_weights(checkpoint, wanted, of_family=structure.name_weight)
    if checkpoint is not None and config.tie_word_embeddings:
        is_tied = is_head_tied(checkpoint, structure.rule_of("embed_tokens.embedding"))
        if not is_tied:
            config = dataclasses.replace(config, tie_word_embeddings=False)
            structure = make_structure(config)
    file_bytes = None if files is None else files.num_bytes
    check_weight_memory(
        structure.weight_bytes(encoder, checkpoint), mesh, platform, file_bytes=file_bytes
    )
    return LoadedModel(
        **structure.fill(encoder, checkpoint, seed=seed),
        file_bytes=file_bytes,
    )


def _open_files(folder: Path) -> SafetensorsCheckpoint | GGUFCheckpoint:
    if folder.is_file():
        return GGUFCheckpoint(folder)
    return MistralCheckpoint(folder) if has_mistral_files(folder) else SafetensorsCheckpoint(folder)


def open_weights(files: SafetensorsCheckpoint | GGUFCheckpoint, dtype: ModelDtype) -> Checkpoint:
    """Returns the files, or a view of them with dequantized weights."""
    if isinstance(files, GGUFCheckpoint):
        return files
    weight_format = read_weight_format(files.folder)
    if weight_format is None:
        return files
    return DequantizedCheckpoint(files, weight_format, dtype=dtype)


def _check_choice(name: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ModelError(f"{name} is {got!r}; expected one of {', '.join(choices)}.")

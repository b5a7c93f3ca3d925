"""Functions that load the head that drafts for a model."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.config.eagle3_config import read_eagle3_config
from models.config.split_over_devices import check_split
from models.drafters.eagle3_head import Eagle3Head
from models.drafters.mtp_heads import find_mtp_head
from models.errors import ModelConfigError, UnsupportedModelError
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_model import LoadFormat, open_weights
from models.loading.loaded_head import LoadedHead
from models.loading.loaded_model import LoadedModel
from models.loading.module_structure import ModuleStructure
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.loading.source import read_config_file
from models.loading.tensor_names import name_weights


def load_mtp_head(
    model: LoadedModel,
    folder: Path,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    encoder: KernelEncoder,
    mesh: Mesh | None = None,
) -> LoadedHead:
    """Loads the head onto the devices of its target, in the dtype of its target.

    Args:
        model: The target.
        folder: The target's checkpoint.
        load_format: As in `load_model`.
        seed: As in `load_model`.
        encoder: Of the target's kernels.
        mesh: Of the target, as in `load_model`.

    Raises:
        ModelError: The model has no such head, or its weights do not fit.
    """
    head_class = find_mtp_head(model.config)
    config, prefix = head_class.config_of(model.config), head_class.prefix_of(model.config)

    def make(*, has_head_kernel: bool) -> nnx.Module:
        return head_class(config, prefix=prefix, dtype=jnp.dtype(model.dtype))

    structure = ModuleStructure(
        config,
        make=make,
        dtype=model.dtype,
        encoder=encoder,
        mesh=mesh,
        splits_experts=model.splits_experts,
    )
    files = None if load_format == "dummy" else SafetensorsCheckpoint(folder)
    if files is not None and not any(name.startswith(prefix) for name in files.weights):
        raise UnsupportedModelError(
            f"method 'mtp' needs the tensors {prefix}* of the layer for multi-token prediction; "
            f"{folder} has none. Use a checkpoint that has them, or another method."
        )
    taps = head_class.taps_of(model.config)
    return LoadedHead(**_fill(structure, encoder, files, seed=seed), taps=taps)


def load_eagle3_head(
    model: LoadedModel, folder: Path, *, encoder: KernelEncoder, mesh: Mesh | None = None
) -> LoadedHead:
    """Loads an EAGLE-3 head onto the devices of its target, in the dtype of its target.

    Args:
        model: The target.
        folder: With config.json and safetensors files.
        encoder: Of the target's kernels.
        mesh: Of the target, as in `load_model`.

    Raises:
        ModelError: The head does not fit the model, or its weights do not fit.
    """
    config = read_eagle3_config(read_config_file(folder), model.config)
    check_split(config, 1 if mesh is None else mesh.size)
    files = SafetensorsCheckpoint(folder)
    has_embedding = any(name.endswith("embed_tokens.weight") for name in files.weights)
    if not has_embedding and config.hidden_size != model.config.hidden_size:
        raise ModelConfigError(
            f"{folder}: hidden_size of the drafter is {config.hidden_size}; the model has "
            f"{model.config.hidden_size}. A head of another width needs embed_tokens.weight, which "
            "its checkpoint lacks. Use a head that was trained for this model."
        )

    def make(*, has_head_kernel: bool) -> nnx.Module:
        return Eagle3Head(config, has_embedding=has_embedding, dtype=jnp.dtype(model.dtype))

    structure = ModuleStructure(config, make=make, dtype=model.dtype, encoder=encoder, mesh=mesh)
    return LoadedHead(**_fill(structure, encoder, files), taps=config.taps)


def _fill(
    structure: ModuleStructure,
    encoder: KernelEncoder,
    files: SafetensorsCheckpoint | None,
    *,
    seed: int = 0,
) -> dict[str, object]:
    checkpoint = None if files is None else open_weights(files, structure.dtype)
    if checkpoint is not None:
        name_weights(checkpoint, structure.source_names, of_family=structure.name_weight)
    return structure.fill(encoder, checkpoint, seed=seed)

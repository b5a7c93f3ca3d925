"""`load_mtp_head`: reads the draft head that a model's own checkpoint has."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from models.drafters.mtp_head import make_mtp_head, mtp_config
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_model import LoadFormat, open_weights
from models.loading.loaded_head import LoadedHead
from models.loading.loaded_model import LoadedModel
from models.loading.module_structure import ModuleStructure
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.loading.tensor_names import name_weights


def load_mtp_head(
    model: LoadedModel,
    folder: Path,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    encoder: KernelEncoder,
) -> LoadedHead:
    """Loads the head onto the default device, in the dtype of its target.

    Args:
        model: The target.
        folder: The target's checkpoint.
        load_format: As in `load_model`; so is `seed`.
        encoder: Of the target's kernels.

    Raises:
        ModelError: The model has no such head, or its weights do not fit.
    """
    config, dtype = mtp_config(model.config), model.dtype
    layer_idx = model.config.num_layers

    def make(*, has_head_kernel: bool) -> nnx.Module:
        return make_mtp_head(config, layer_idx=layer_idx, dtype=jnp.dtype(dtype))

    structure = ModuleStructure(config, make=make, dtype=dtype, encoder=encoder)
    files = None if load_format == "dummy" else SafetensorsCheckpoint(folder)
    checkpoint = None if files is None else open_weights(files, dtype)
    if checkpoint is not None:
        name_weights(checkpoint, structure.source_names)
    return LoadedHead(**structure.fill(encoder, checkpoint, seed=seed))

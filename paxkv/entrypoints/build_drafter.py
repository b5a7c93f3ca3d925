"""Finds and loads the drafter that `speculative_config` names, if it has weights."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from models import LoadedModel, ModelError, load_model, read_model_config
from models import ModelConfig as TargetConfig
from models.config.eagle3_config import read_eagle3_config
from models.demo import DRAFT_HEAD
from models.drafters.mtp_heads import find_mtp_head
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head, load_mtp_head
from models.loading.loaded_draft_model import (
    LoadedDrafter,
    LoadedDraftModel,
    check_draft_model,
)
from models.loading.source import read_config_file, resolve_model_folder
from models.platforms import default_platform
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY
from paxkv.runner.memory.device_mesh import find_mesh

logger = logging.getLogger(__name__)


def check_drafter(config: EngineConfig, target: TargetConfig) -> None:
    """Rejects a drafter that does not fit the model, before any weights are downloaded."""
    if not _has_weights(config):
        return
    with _named_errors():
        method = config.runner.speculative_config.method
        if method == "mtp":
            find_mtp_head(target).config_of(target)
            return
        folder = _drafter_folder(config, with_weights=False)
        if method == "eagle3":
            read_eagle3_config(read_config_file(folder), target)
        else:
            check_draft_model(read_model_config(folder), target)


def load_drafter(config: EngineConfig, model: LoadedModel, folder: Path) -> LoadedDrafter | None:
    """Loads the drafter with weights; None if the method of drafts has none."""
    if not _has_weights(config):
        return None
    with _named_errors():
        head = _load_of_method(config, model, folder)
    logger.info("drafter: %s", head.describe_weights())
    return head


def _load_of_method(config: EngineConfig, model: LoadedModel, folder: Path) -> LoadedDrafter:
    mesh = find_mesh(config.parallel.tensor_parallel_size)
    encoder, method = _make_encoder(config), config.runner.speculative_config.method
    load_format, seed = config.model.load_format, config.model.seed
    if method == "mtp":
        return load_mtp_head(
            model, folder, load_format=load_format, seed=seed, encoder=encoder, mesh=mesh
        )
    if method == "eagle3":
        # The weights show whether the head has an embedding, so "dummy" reads them too.
        head_folder = _drafter_folder(config, with_weights=True)
        return load_eagle3_head(model, head_folder, encoder=encoder, mesh=mesh)
    max_model_len = config.model.max_model_len
    draft_model = load_model(
        _drafter_folder(config, with_weights=load_format != "dummy"),
        dtype=model.dtype,
        load_format=load_format,
        seed=seed,
        has_unified_kv=config.cache.disable_hybrid_kv_cache_manager,
        max_model_len=None if max_model_len == FIT_MEMORY else max_model_len,
        product_dtype=encoder.product_dtype,
        quantization=encoder.quantization,
        quantization_group_size=encoder.group_size,
        panel_width=encoder.panel_width,
        platform=encoder.platform,
        mesh=mesh,
    )
    return LoadedDraftModel.of_model(draft_model, model)


def _make_encoder(config: EngineConfig) -> KernelEncoder:
    """Makes the encoder that stores the draft head's kernels as the model's kernels are stored."""
    platform, num_devices = default_platform(), config.parallel.tensor_parallel_size
    panel_width = platform.column_panel_width(batch_invariant=config.runner.batch_invariant)
    return KernelEncoder(
        platform=platform,
        product_dtype=config.model.product_dtype,
        panel_width=panel_width if num_devices == 1 else None,
        quantization=config.model.quantization,
        group_size=config.model.quantization_group_size,
        num_devices=num_devices,
    )


def _has_weights(config: EngineConfig) -> bool:
    speculative = config.runner.speculative_config
    return speculative is not None and speculative.is_on_device


def _drafter_folder(config: EngineConfig, *, with_weights: bool) -> Path:
    """The folder of the head or of the smaller model that `speculative_config` names."""
    if config.runner.speculative_config.model is None:
        return DRAFT_HEAD
    return resolve_model_folder(
        config.runner.speculative_config.model,
        with_weights=with_weights,
        token=config.model.hf_token,
    )


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Names the setting in errors about the drafter. They would seem to be about the model."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"speculative_config: {error}") from error

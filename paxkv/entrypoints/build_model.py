"""Finds and loads the model that `ModelConfig` names."""

import logging
import os
from pathlib import Path

from models import LoadedModel, load_model, read_model_config
from models.config.split_over_devices import check_context_ranks, check_split
from models.demo import CHECKPOINT
from models.loading.gguf.gguf_tokenizer import write_tokenizer_of
from models.loading.mistral_tokenizer import find_mistral_tokenizer, write_mistral_tokenizer
from models.loading.source import resolve_model_folder
from models.platforms import default_platform
from models.platforms.gpu import SHARE_VARIABLE
from paxkv.config.engine_config import EngineConfig
from paxkv.config.generation_config import generation_config_folder
from paxkv.config.model_config import AUTO_MODEL_IMPL, FIT_MEMORY, ModelConfig
from paxkv.entrypoints.build_drafter import check_drafter
from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.programs.program_store import user_cache_folder
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def find_model_folder(config: EngineConfig) -> Path:
    """Finds the model's folder. Rejects unsupported models before weights are downloaded.

    Raises:
        ModelError: The model or its drafter cannot be found, or a config.json describes an
            unsupported model, or the drafter does not fit the model.
    """
    model = config.model
    if model.model is None:
        folder = CHECKPOINT
    else:
        folder = resolve_model_folder(
            model.model, with_weights=False, revision=model.revision, token=model.hf_token
        )
    hf_config = read_model_config(
        folder,
        generation_folder=generation_config_folder(model.generation_config, folder),
        model_impl=model.model_impl,
    )
    num_devices = config.parallel.tensor_parallel_size
    check_split(hf_config, num_devices)
    check_context_ranks(hf_config, num_devices, config.parallel.decode_context_parallel_size)
    check_drafter(config, hf_config)
    is_on_hub = model.model is not None and not Path(model.model).expanduser().is_dir()
    if is_on_hub and model.load_format != "dummy":
        folder = resolve_model_folder(
            model.model, with_weights=True, revision=model.revision, token=model.hf_token
        )
    return folder


def find_text_folder(config: ModelConfig, model_folder: Path) -> Path:
    """The folder of the tokenizer and of its chat template.

    Raises:
        ModelError: The tokenizer cannot be found, or is Mistral's own and cannot be read.
    """
    if config.tokenizer is None and config.tokenizer_revision is None:
        found = model_folder
    else:
        found = resolve_model_folder(
            config.tokenizer or config.model or model_folder,
            with_weights=False,
            revision=config.tokenizer_revision,
            token=config.hf_token,
        )
    programs = user_cache_folder()
    cache = programs and programs.parent / "tokenizers"
    if found.is_file():
        # A file without a tokenizer is like a folder without one.
        return write_tokenizer_of(found, cache) or found
    own = None if (found / "tokenizer.json").is_file() else find_mistral_tokenizer(found)
    return found if own is None else write_mistral_tokenizer(own, cache)


def load_target(config: EngineConfig, folder: Path, tokenizer: Tokenizer | None) -> LoadedModel:
    """Loads the model, and excludes tokens that its tokenizer does not have."""
    # JAX reads this variable when it first uses a GPU. It is the only way to limit JAX's memory.
    os.environ.setdefault(SHARE_VARIABLE, f"{config.cache.gpu_memory_utilization:g}")
    mesh = find_mesh(config.parallel.tensor_parallel_size)
    if config.parallel.enable_expert_parallel and mesh is None:
        logger.warning(
            "enable_expert_parallel has no effect with tensor_parallel_size=1: one device has all "
            "experts."
        )
    platform = default_platform()
    max_model_len = config.model.max_model_len
    model = load_model(
        folder,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        seed=config.model.seed,
        has_unified_kv=config.cache.disable_hybrid_kv_cache_manager,
        max_model_len=None if max_model_len == FIT_MEMORY else max_model_len,
        product_dtype=config.model.product_dtype,
        quantization=config.model.quantization,
        quantization_group_size=config.model.quantization_group_size,
        generation_folder=generation_config_folder(config.model.generation_config, folder),
        model_impl=config.model.model_impl,
        panel_width=platform.column_panel_width(batch_invariant=config.runner.batch_invariant),
        platform=platform,
        mesh=mesh,
        enable_expert_parallel=config.parallel.enable_expert_parallel,
    )
    logger.info("%s", model.describe_weights())
    is_own_class = model.class_name.startswith("models.families.")
    if config.model.model_impl != AUTO_MODEL_IMPL or not is_own_class:
        logger.info(
            "the model runs as the class %s (model_impl=%s).",
            *(model.class_name, config.model.model_impl),
        )
    if tokenizer is None:
        return model
    return model.without_tokens(tokenizer.ids_without_token(model.config.vocab_size))

"""Decoder-only language models over a paged KV cache, loaded from Hugging Face checkpoints."""

from models.cache.attention_format import AttentionFormat
from models.cache.format import CacheFormat, Pages
from models.config.attention_config import AttentionConfig
from models.config.model_config import ModelConfig
from models.config.rope_config import RopeConfig
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec
from models.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelConfigError,
    ModelError,
    UnsupportedModelError,
    WeightMismatchError,
)
from models.forward.forward_batch import ForwardBatch, GroupInputs, StateInputs
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import CachePlace, LayerContext, LayerPlaces
from models.forward.report import Report
from models.forward.row_widths import Width, run_at_width
from models.forward.wants import Outputs, Wants
from models.layers.experts import EXPERT_TOKENS
from models.loading.load_model import load_model
from models.loading.loaded_model import LoadedModel
from models.loading.source import read_model_config, resolve_model_folder
from models.platforms import Platform, platform_of
from models.registry import read_config

__all__ = [
    "EXPERT_TOKENS",
    "AttentionConfig",
    "AttentionFormat",
    "CacheFormat",
    "CachePlace",
    "CacheRef",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DecoderSpec",
    "ForwardBatch",
    "GroupInputs",
    "StateInputs",
    "KernelSettings",
    "LayerContext",
    "LayerPlaces",
    "LayerSpec",
    "LoadedModel",
    "ModelConfig",
    "ModelConfigError",
    "ModelError",
    "Outputs",
    "Pages",
    "Platform",
    "Report",
    "RopeConfig",
    "UnsupportedModelError",
    "Wants",
    "WeightMismatchError",
    "Width",
    "load_model",
    "platform_of",
    "read_config",
    "read_model_config",
    "resolve_model_folder",
    "run_at_width",
]

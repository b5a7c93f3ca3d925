"""Loads what the program of `CompiledGenerator` needs to verify drafts, from its settings."""

import dataclasses

from models import LoadedModel, ModelError, load_model
from models.loading.loaded_draft_model import LoadedDraftModel
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError
from paxkv.runner.memory.device_mesh import mesh_of
from paxkv.runner.shapes.program_shapes import NgramShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts:
    """Drafts of a smaller model with the same tokenizer.

    Args:
        num_drafts: Most drafts of a row in a step.
    """

    model: LoadedDraftModel
    num_drafts: int


def load_drafts(
    config: SpeculativeConfig | None, model: LoadedModel, *, max_model_len: int | None
) -> NgramShape | ModelDrafts | None:
    """Reads the settings of drafts, and loads a draft model onto the devices of `model`.

    Args:
        max_model_len: As in `load_model`.

    Raises:
        ConfigError: `CompiledGenerator` does not support the method.
        ModelError: The draft model cannot be loaded, or does not fit `model`.
    """
    if config is None:
        return None
    if config.method == "ngram":
        return NgramShape.of_config(config)
    if config.method != "draft_model":
        raise ConfigError(
            "CompiledGenerator supports only the methods 'ngram' and 'draft_model', got "
            f"{config.method!r}. Use LLM for the other methods."
        )
    mesh = mesh_of(model.params[0])
    try:
        draft_model = load_model(
            config.model,
            dtype=model.dtype,
            max_model_len=max_model_len,
            platform=model.platform,
            mesh=mesh if mesh.size > 1 else None,
        )
        drafter = LoadedDraftModel.of_model(draft_model, model)
    except ModelError as error:
        raise type(error)(f"speculative_config: {error}") from error
    return ModelDrafts(model=drafter, num_drafts=config.num_speculative_tokens)

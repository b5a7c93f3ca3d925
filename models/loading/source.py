"""Finds a model's folder, on disk or through the Hugging Face hub, and reads its configuration."""

import dataclasses
import json
import logging
from pathlib import Path

import huggingface_hub

from models.config import ModelConfig
from models.config_fields import read_token_ids
from models.errors import CheckpointNotFoundError, ModelConfigError
from models.registry import read_config

logger = logging.getLogger(__name__)

# Configuration, tokenizer and chat template.
SMALL_FILE_PATTERNS = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
# As transformers names them; "consolidated.safetensors" holds the same weights in another layout.
WEIGHT_FILE_PATTERNS = ("model.safetensors", "model-*.safetensors")


def resolve_model_folder(
    model: str | Path, *, with_weights: bool = True, revision: str | None = None
) -> Path:
    """Returns the local folder of a model, downloading a hub repository where needed.

    Args:
        model: A folder, or a hub name such as "Qwen/Qwen3-0.6B".
        with_weights: False fetches only the configuration and the tokenizer.
        revision: Branch, tag or commit of the hub repository; None is the main branch. A folder
            has none.

    Raises:
        CheckpointNotFoundError: Neither a folder nor a hub repository that can be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            logger.warning(
                "revision %r has no effect: %s is a folder, and its files are used as they are.",
                *(revision, folder),
            )
        return folder
    patterns = [*SMALL_FILE_PATTERNS, *(WEIGHT_FILE_PATTERNS if with_weights else ())]
    try:
        # By its full name: the package loads what it takes to download, a seventh of the time that
        # all imports of a server take, when it is first asked for it.
        return Path(
            huggingface_hub.snapshot_download(
                str(model), revision=revision, allow_patterns=patterns
            )
        )
    # What is no hub name at all is a ValueError.
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise CheckpointNotFoundError(
            f"model {str(model)!r}{_at(revision)} is neither a folder nor a hub repository that "
            f"can be fetched ({type(error).__name__}: {reason}). Wanted a folder with config.json "
            "and *.safetensors, or a name like 'Qwen/Qwen3-0.6B'. Check the spelling and the "
            "network, log in with `hf auth login` if the repository is gated, or pass a downloaded "
            "folder."
        ) from error


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at revision {revision!r}"


def read_model_config(folder: Path, *, generation_folder: Path | None = None) -> ModelConfig:
    """Reads config.json, and adds the end-of-sequence ids of generation_config.json.

    Chat models list the token that ends a turn only there, so that without it they never stop.

    Args:
        generation_folder: Has the generation_config.json; None is `folder`, which may have none.

    Raises:
        ModelConfigError: A file is missing or malformed.
        UnsupportedModelError: The model needs something that is not built.
    """
    config = read_config(_read_json_object(folder / "config.json"))
    generation_path = (generation_folder or folder) / "generation_config.json"
    if not generation_path.is_file():
        return config
    generation_eos_ids = read_token_ids(_read_json_object(generation_path), "eos_token_id")
    # dict.fromkeys keeps the first of equal ids, in order.
    eos_token_ids = tuple(dict.fromkeys(config.eos_token_ids + generation_eos_ids))
    return dataclasses.replace(config, eos_token_ids=eos_token_ids)


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} does not exist; wanted a folder in Hugging Face layout. "
            "Point at the folder that holds config.json and the *.safetensors files."
        ) from None
    except OSError as error:
        raise ModelConfigError(
            f"{path} cannot be read: {error.strerror}. Wanted a JSON file."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is no good JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} holds a {type(content).__name__}; wanted a JSON object.")
    return content

"""Finds a model's folder, on disk or through the Hugging Face hub, and reads its configuration."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub

from models.config.fields import read_token_ids
from models.config.model_config import ModelConfig
from models.errors import CheckpointNotFoundError, ModelConfigError
from models.loading.gguf import (
    GGUF_SUFFIX,
    find_gguf_file,
    list_gguf_files,
    listed,
    make_config,
    parse_gguf_on_hub,
    read_gguf,
)
from models.loading.json_file import read_json_object
from models.loading.mistral_files import has_mistral_files, make_mistral_config
from models.loading.quantized import WeightFormat, find_weight_format
from models.model_impl import AUTO
from models.registry import read_config

logger = logging.getLogger(__name__)

# Configuration, tokenizer and chat template.
SMALL_FILE_PATTERNS = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
# As transformers names them; "consolidated.safetensors" holds the same weights in another layout.
WEIGHT_FILE_PATTERNS = ("model.safetensors", "model-*.safetensors")
MISTRAL_WEIGHT_PATTERNS = ("consolidated.safetensors", "consolidated-*.safetensors")


def resolve_model_folder(
    model: str | Path,
    *,
    with_weights: bool = True,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Returns the local folder of a model, downloading a hub repository where needed.

    Instead of a folder that contains nothing but one GGUF file, it returns the path of this file.

    Args:
        model: A folder, a GGUF file, or a hub name such as "Qwen/Qwen3-0.6B". A GGUF file on the
            hub is "OWNER/NAME:QUANT" or "OWNER/NAME/FILE.gguf".
        with_weights: False fetches only the configuration and the tokenizer. It has no effect for
            GGUF files, which contain both.
        revision: Branch, tag or commit of the hub repository; None is the main branch. It has no
            effect for a folder.
        token: The hub's access token; None is `HF_TOKEN`, or the token of `hf auth login`.

    Raises:
        CheckpointNotFoundError: The model is neither a folder nor a hub repository that can be
            downloaded, or no single GGUF file of the repository has this name.
        UnsupportedModelError: The GGUF file is split.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            logger.warning(
                "revision %r has no effect: %s is a folder, and its files are used as they are.",
                *(revision, folder),
            )
        return find_gguf_file(folder) or folder
    if folder.is_file():
        if folder.suffix == GGUF_SUFFIX:
            return folder
        raise CheckpointNotFoundError(
            f"model {str(model)!r} is a file; it must be a folder with config.json and "
            "*.safetensors files, a GGUF file, or the name of a Hub repository such as "
            "'Qwen/Qwen3-0.6B'."
        )
    options = {"revision": revision, "token": token}
    if (gguf := parse_gguf_on_hub(str(model))) is not None:
        found = _download(gguf.repository, SMALL_FILE_PATTERNS, **options)
        name = gguf.choose(_list_files(gguf.repository, found, **options))
        return _download(gguf.repository, (*SMALL_FILE_PATTERNS, name), **options) / name
    # The small files say which files hold the weights.
    found = _download(str(model), SMALL_FILE_PATTERNS, **options)
    if with_weights:
        weights = MISTRAL_WEIGHT_PATTERNS if has_mistral_files(found) else WEIGHT_FILE_PATTERNS
        found = _download(str(model), (*SMALL_FILE_PATTERNS, *weights), **options)
    has_config = has_mistral_files(found) or (found / "config.json").is_file()
    if not has_config or (with_weights and not any(found.glob("*.safetensors"))):
        _check_for_gguf(str(model), _list_files(str(model), found, **options))
    return found


def _list_files(
    repository: str, found: Path, *, revision: str | None, token: str | None
) -> list[str]:
    """Lists the files of a repository. If the hub cannot be reached, lists the cached files."""
    try:
        return huggingface_hub.list_repo_files(repository, revision=revision, token=token)
    # The client's HTTP library raises errors of its own, without a common base.
    except Exception as error:
        logger.info(
            "the files of %s cannot be listed (%s: %s); the files in the cache are used.",
            *(repository, type(error).__name__, error),
        )
        return [str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()]


def _check_for_gguf(repository: str, names: Sequence[str]) -> None:
    if found := list_gguf_files(names):
        raise CheckpointNotFoundError(
            f"{repository} has no safetensors files with a config.json, but GGUF files: "
            f"{listed(found)}. Name one of them, such as {repository}/{found[0]} or "
            f"{repository}:QUANT with the quantization at the end of its name."
        )


def _download(
    name: str, patterns: Sequence[str], *, revision: str | None, token: str | None
) -> Path:
    try:
        # The full name delays imports: huggingface_hub imports its download code when the function
        # is first used, which takes a seventh of the time of all imports of a server.
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=[*patterns], token=token
            )
        )
    # ValueError: the name cannot be the name of a repository.
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise CheckpointNotFoundError(
            f"model {name!r}{_at(revision)} is neither a folder nor a hub repository that "
            f"can be downloaded ({type(error).__name__}: {reason}). It must be a folder with "
            "config.json and *.safetensors files, or a name such as 'Qwen/Qwen3-0.6B'. Check the "
            "spelling and the network, log in with `hf auth login` or set HF_TOKEN if the "
            "repository is gated, or use a downloaded folder."
        ) from error


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at revision {revision!r}"


def read_model_config(
    folder: Path, *, generation_folder: Path | None = None, model_impl: str = AUTO
) -> ModelConfig:
    """Reads config.json, and adds the end-of-sequence ids of generation_config.json.

    Many chat models list the token that ends a turn only in generation_config.json. Without this
    token, their answers would not end.

    Args:
        generation_folder: The folder of generation_config.json; None is `folder`. The file may be
            missing.
        model_impl: As in `models.registry.read_config`.

    Raises:
        ModelConfigError: config.json is missing, or one of the files is malformed.
        UnsupportedModelError: The model needs a feature that paxkv does not have.
        ModelError: `model_impl` names no model class.
    """
    hf_config = read_config_file(folder)
    config = read_config(hf_config, model_impl=model_impl)
    # So that an unknown format is refused before its weights are downloaded.
    find_weight_format(hf_config)
    generation_path = (generation_folder or folder) / "generation_config.json"
    if not generation_path.is_file():
        return config
    generation_eos_ids = read_token_ids(
        read_json_object(generation_path), "eos_token_id", file=generation_path.name
    )
    # dict.fromkeys keeps the first of equal ids, in order.
    eos_token_ids = tuple(dict.fromkeys(config.eos_token_ids + generation_eos_ids))
    return dataclasses.replace(config, eos_token_ids=eos_token_ids)


def read_weight_format(folder: Path) -> WeightFormat | None:
    """How config.json says that the weights are quantized; None if they are not.

    Raises:
        ModelConfigError: config.json is missing or malformed.
        UnsupportedModelError: paxkv does not read this format.
    """
    return find_weight_format(read_config_file(folder))


def read_config_file(folder: Path) -> dict[str, object]:
    """Returns the object in config.json.

    Raises:
        ModelConfigError: The file is missing or malformed.
    """
    if folder.suffix == GGUF_SUFFIX and folder.is_file():
        return make_config(read_gguf(folder))
    if has_mistral_files(folder):
        return make_mistral_config(folder)
    path = folder / "config.json"
    if not path.exists() and (folder / "adapter_config.json").is_file():
        raise ModelConfigError(
            f"{path} does not exist, and the folder contains a LoRA adapter (adapter_config.json). "
            "LoRA adapters are not supported. Merge the adapter into its base model "
            "(`merge_and_unload()` in PEFT), save the result, and load that folder."
        )
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    return read_json_object(
        path,
        if_missing=(
            f"Use the folder {snapshots[0].parent} of the Hub's cache."
            if snapshots
            else "Use a folder in Hugging Face layout, which contains config.json and the "
            "*.safetensors files."
        ),
    )

"""Loading a model: from a folder or the hub, or with random weights."""

from models.loading.load_model import load_model
from models.loading.loaded_model import LoadedModel
from models.loading.source import read_model_config, resolve_model_folder

__all__ = ["LoadedModel", "load_model", "read_model_config", "resolve_model_folder"]

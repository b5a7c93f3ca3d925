"""GGUF files: their tensors, and a config.json made from their metadata."""

from models.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from models.loading.gguf.gguf_config import make_config
from models.loading.gguf.gguf_file import GGUF_SUFFIX, find_gguf_file, read_gguf
from models.loading.gguf.gguf_on_hub import list_gguf_files, listed, parse_gguf_on_hub

__all__ = [
    "GGUF_SUFFIX",
    "GGUFCheckpoint",
    "find_gguf_file",
    "list_gguf_files",
    "listed",
    "make_config",
    "parse_gguf_on_hub",
    "read_gguf",
]

"""Versions and environment variables that a report may show. They contain no secrets."""

import importlib.metadata
import os

PACKAGES = (
    ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "huggingface_hub")
    + ("tokenizers", "jinja2", "msgspec", "pyzmq", "starlette", "uvicorn", "prometheus_client")
    + ("llguidance", "torch", "transformers", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
)  # fmt: skip
# Variables that a report shows. Other variables, and their names, are not shown.
_VARIABLES = (
    ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64", "XLA_FLAGS")
    + ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES")
    + ("OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "LIBTPU_INIT_ARGS")
)  # fmt: skip


def package_version(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shown_variables() -> dict[str, str]:
    """The environment variables that are set and may be shown."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}

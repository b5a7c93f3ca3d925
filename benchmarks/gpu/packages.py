"""Which packages the benchmark needs, and what each part of it goes without."""

import importlib.util
from collections.abc import Sequence

# Import name -> name to install it by, where they differ.
_INSTALL_NAMES = {"zmq": "pyzmq"}

# Models and compiled steps.
STEP_PACKAGES = ("jax", "flax", "numpy", "safetensors", "huggingface_hub", "tqdm")
# paxkv's scheduler and engine, besides.
ENGINE_PACKAGES = ("msgspec", "cbor2", "xxhash", "zmq")
PEER_PACKAGES = ("torch", "transformers")


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those that cannot be imported, by the name to install them by."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return [_INSTALL_NAMES.get(name, name) for name in missing]


def missing_text(what: str, missing: Sequence[str]) -> str:
    """What is said where packages are missing."""
    names = " ".join(missing)
    return (
        f"{what} needs {', '.join(missing)}, which cannot be imported here. Run `pip install "
        f"{names}`; where nothing can be fetched, bring the wheels (`pip download {names}` on "
        "another machine) and put them on PYTHONPATH."
    )

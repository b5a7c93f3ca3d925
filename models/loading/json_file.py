"""Reads the JSON files of a checkpoint."""

import json
from pathlib import Path

from models.errors import ModelConfigError

_LFS_POINTER = b"version https://git-lfs"


def read_json_object(path: Path, *, if_missing: str = "Download it.") -> dict[str, object]:
    """Reads a JSON object, encoded as UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    Args:
        if_missing: What to do if the file does not exist, for the message.

    Raises:
        ModelConfigError: The file does not exist, cannot be read, or contains no JSON object.
    """
    try:
        encoded = path.read_bytes()
    except FileNotFoundError:
        raise ModelConfigError(f"{describe_missing(path)} {if_missing}") from None
    except OSError as error:
        raise ModelConfigError(
            f"{path} cannot be read: {error.strerror}. It must be a JSON file that this user may "
            "read."
        ) from error
    if encoded.startswith(_LFS_POINTER):
        raise ModelConfigError(
            f"{path} is a Git LFS pointer: the file itself was not downloaded. Run `git lfs pull` "
            "in its folder."
        )
    try:
        content = json.loads(encoded)  # finds the encoding of bytes
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"{path} is not valid JSON ({len(encoded):,} bytes): {error}. Correct the file or "
            "download it again."
        ) from error
    if not isinstance(content, dict):
        raise ModelConfigError(
            f"{path} contains {_described(content)}; it must contain a JSON object. Correct the "
            "file or download it again."
        )
    return content


def describe_missing(path: Path) -> str:
    """Says that a file does not exist. If it is a link, the text names the missing target."""
    if path.is_symlink():
        return (
            f"{path} is a link to {path.readlink()}, which does not exist. Copy the checkpoint "
            "with the files that its links name (`cp -rL`)."
        )
    return f"{path} does not exist."


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file contains the text that Git LFS stores in place of a large file."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def _described(content: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(content), "a number")

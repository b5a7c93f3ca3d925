"""Names of GGUF files on the hub: OWNER/NAME:QUANT, as vLLM and llama.cpp have it, and
OWNER/NAME/FILE.gguf, as vLLM has it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from models.errors import CheckpointNotFoundError, UnsupportedModelError
from models.loading.gguf.gguf_file import GGUF_SUFFIX

_PART_OF_SPLIT = re.compile(r"-\d+-of-\d+$")
# A dynamic quantization, such as UD-Q4_K_M. Its layers have different formats.
_DYNAMIC = re.compile(r"[-.]UD[-.][^-.]+$", re.IGNORECASE)
# A vision encoder in a file of its own, as llama.cpp has it: mmproj-F16.gguf, M.mmproj-Q8_0.gguf.
_ENCODER = re.compile(r"(^|[-.])mmproj([-.]|$)", re.IGNORECASE)
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFOnHub:
    """A GGUF file of a hub repository, by its quantization or by its name."""

    repository: str
    quantization: str | None = None
    file_name: str | None = None

    def choose(self, names: Sequence[str]) -> str:
        """Returns the file's name in the repository.

        Args:
            names: All files of the repository.

        Raises:
            CheckpointNotFoundError: No file fits, or several do.
            UnsupportedModelError: The model is split into several files.
        """
        found = list_gguf_files(names)
        if self.file_name is not None:
            fitting = [name for name in found if name == self.file_name]
        else:
            fitting = [name for name in found if _has_quantization(name, self.quantization)]
        if fitting and all(_is_part(name) for name in fitting):
            raise UnsupportedModelError(
                f"{self.repository}: {fitting[0]} is a part of a split file; paxkv reads GGUF "
                "files that are not split. Download the parts, merge them with "
                "`llama-gguf-split --merge`, and use the merged file."
            )
        fitting = [name for name in fitting if not _is_part(name)]
        if len(fitting) > 1:
            # For Q4_K_M, "M-Q4_K_M.gguf" is chosen and "M-UD-Q4_K_M.gguf" is not.
            fitting = [name for name in fitting if not _DYNAMIC.search(_stem(name))] or fitting
        if len(fitting) == 1:
            return fitting[0]
        wanted = self.file_name or f"of quantization {self.quantization}"
        problem = "several GGUF files" if fitting else "no GGUF file"
        raise CheckpointNotFoundError(
            f"{self.repository} has {problem} {wanted}; it has {listed(fitting or found)}. Name "
            f"one of them, such as {self.repository}/{(fitting or found or ['FILE.gguf'])[0]}."
        )


def parse_gguf_on_hub(model: str) -> GGUFOnHub | None:
    """Reads the name of a model; None if it names no GGUF file on the hub."""
    parts = model.split("/", 2)
    if len(parts) == 3 and all(parts) and model.endswith(GGUF_SUFFIX):
        return GGUFOnHub(repository="/".join(parts[:2]), file_name=parts[2])
    # Names of repositories have no colon.
    repository, colon, quantization = model.partition(":")
    if colon and quantization and repository.count("/") == 1 and not model.startswith((".", "/")):
        return GGUFOnHub(repository=repository, quantization=quantization)
    return None


def list_gguf_files(names: Sequence[str]) -> list[str]:
    """The GGUF files with language models, sorted."""
    return sorted(
        name for name in names if name.endswith(GGUF_SUFFIX) and not _ENCODER.search(_stem(name))
    )


def listed(names: Sequence[str]) -> str:
    """Lists the first names, and counts the rest."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) or "none") + more


def _stem(name: str) -> str:
    return PurePosixPath(name).name.removesuffix(GGUF_SUFFIX)


def _is_part(name: str) -> bool:
    return _PART_OF_SPLIT.search(_stem(name)) is not None


def _has_quantization(name: str, quantization: str) -> bool:
    """Whether the name ends in "-Q4_K_M" or ".Q4_K_M", or in such a name of a part."""
    stem = _PART_OF_SPLIT.sub("", _stem(name)).lower()
    return re.search(rf"(^|[-.]){re.escape(quantization.lower())}$", stem) is not None

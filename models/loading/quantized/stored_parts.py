"""`StoredParts`: the tensors of a quantized checkpoint that one weight is made of."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import StoredWeight

# safetensors' names of the dtypes that scales may have.
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParts:
    """The tensors of one weight, with checks of what the headers of the files say about them.

    Args:
        stem: What the names of the tensors have in common: "model.layers.0.mlp.up_proj".
        tensors: Ending of a tensor's name, such as ".qweight" -> the tensor.
    """

    stem: str
    tensors: Mapping[str, StoredWeight]

    @property
    def module(self) -> str:
        """The name of the `Linear`, as lists of modules in config.json have it."""
        return self.stem.removesuffix(".weight")

    def require(
        self, ending: str, dtypes: Collection[str], *, num_axes: Collection[int] | None = None
    ) -> StoredWeight:
        """Returns the tensor with this ending.

        Raises:
            WeightMismatchError: There is no such tensor, or it has another dtype or number of axes.
        """
        tensor = self.tensors.get(ending)
        if tensor is None:
            present = next(iter(self.tensors.values()))
            raise WeightMismatchError(
                f"{present.path}: tensor {present.name} is stored without {self.stem}{ending}, and "
                "cannot be dequantized. Use weights and config.json of the same release."
            )
        if tensor.dtype not in dtypes:
            raise _mismatch(tensor, f"has dtype {tensor.dtype}", " or ".join(dtypes))
        if num_axes is not None and len(tensor.shape) not in num_axes:
            allowed = f"{' or '.join(map(str, num_axes))} axes"
            raise _mismatch(tensor, f"has shape {list(tensor.shape)}", allowed)
        return tensor

    def check_shape(self, ending: str, *allowed: tuple[int, ...]) -> None:
        """Checks the shape of a tensor that `require` has returned.

        Raises:
            WeightMismatchError: It has none of the allowed shapes.
        """
        tensor = self.tensors[ending]
        if tensor.shape not in allowed:
            shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in allowed))
            raise _mismatch(tensor, f"has shape {list(tensor.shape)}", shapes)


def _mismatch(tensor: StoredWeight, found: str, allowed: str) -> WeightMismatchError:
    return WeightMismatchError(
        f"{tensor.path}: tensor {tensor.name} {found}; quantization_config in config.json needs "
        f"{allowed}. Use weights and config.json of the same release."
    )

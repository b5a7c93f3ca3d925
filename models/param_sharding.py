"""How each parameter is split over a mesh, by the name of the axis that heads are split over."""

from jax.sharding import PartitionSpec

from models.errors import ModelError

# The mesh axis of tensor parallelism; the KV cache splits its heads over the same one.
MODEL_AXIS = "model"

_REPLICATED = PartitionSpec()
_SPLIT_OUT = PartitionSpec(None, MODEL_AXIS)  # kernel [in, out]: each makes some outputs
_SPLIT_IN = PartitionSpec(MODEL_AXIS, None)  # and this one sums over some inputs
_SPLIT_VECTOR = PartitionSpec(MODEL_AXIS)

# Module that holds the parameter -> specs of its kernel and of a number for each output.
_LINEAR_SPECS = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), (_SPLIT_OUT, _SPLIT_VECTOR)
    ),
    **dict.fromkeys(("o_proj", "down_proj"), (_SPLIT_IN, _REPLICATED)),
    "lm_head": (_SPLIT_OUT, _SPLIT_VECTOR),
}


def param_spec(name: str, *, is_transposed: bool = False) -> PartitionSpec:
    """The spec of a parameter such as "layers.0.self_attn.q_proj.kernel", or "....kernel.0".

    A panel of a kernel (`models/loading/column_panels.py`) is whole on every device: panels are for
    one core, and their columns need not divide as the kernel's do.

    Heads and the MLP's inner width are split, the vocabulary too; norms are whole on every device.

    Args:
        is_transposed: It is a kernel [out, in] (`models/loading/product_dtype.py`).

    Raises:
        ModelError: No rule covers the name: a new kind of layer needs one here.
    """
    parts = name.split(".")
    if parts[-1].isdecimal():
        return _REPLICATED
    *_, module, kind = parts
    if kind in ("scale", "offset"):
        return _REPLICATED
    if kind == "embedding":
        return _SPLIT_IN
    if module in _LINEAR_SPECS and kind in ("kernel", "kernel_scale", "bias"):
        spec = _LINEAR_SPECS[module][kind != "kernel"]
        return PartitionSpec(spec[1], spec[0]) if is_transposed else spec
    raise ModelError(f"parameter {name!r} has no sharding; wanted a rule for {module}.{kind}.")

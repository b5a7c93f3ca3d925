"""`MoEConfig`, the config of models with experts, and functions that read its fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.config.dense_config import DenseConfig
from models.config.fields import first_given, read_count, read_flag, read_layer_numbers, read_number
from models.errors import ModelConfigError
from models.layers.routing import SigmoidTopK


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(DenseConfig):
    """The config of a decoder in which some layers have experts in place of the MLP."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # inner width of one expert
    has_experts: tuple[bool, ...]  # of each layer


def read_expert_fields(
    hf_config: Mapping[str, object],
    *,
    num_experts_fields: Sequence[str] = ("num_experts", "num_local_experts"),
    default_num_experts: int | None = None,
    top_k_fields: Sequence[str] = ("num_experts_per_tok",),
    default_top_k: int | None = None,
    size_field: str = "moe_intermediate_size",
    default_size: int | None = None,
) -> dict[str, int]:
    """Reads the fields of `MoEConfig` that `DenseConfig` does not have, except `has_experts`.

    The caller passes the defaults of Hugging Face's configuration class. Without a default, a
    config.json that leaves the field out is an error.

    Args:
        num_experts_fields: Names that config.json may have for the number of experts: checkpoints
            on the hub and transformers 5 differ.
        top_k_fields: Names that config.json may have for the number of experts of one token.
        size_field: Name of the inner width of one expert.

    Raises:
        ModelConfigError: A field is of the wrong type, two names of one field have unequal values,
            or a token goes to more experts than exist.
    """
    name = first_given(hf_config, num_experts_fields)
    num_experts = read_count(hf_config, name, default_num_experts)
    top_k_name = first_given(hf_config, top_k_fields)
    top_k = read_count(hf_config, top_k_name, default_top_k)
    if top_k > num_experts:
        raise ModelConfigError(
            f"config.json: {top_k_name} is {top_k}, and {name} is {num_experts}; a token cannot "
            "have more experts than there are."
        )
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": read_count(hf_config, size_field, default_size),
    }


def read_sparse_steps(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts.

    Every `decoder_sparse_step`-th layer has experts, except the layers in `mlp_only_layers`.
    """
    step = read_count(hf_config, "decoder_sparse_step", 1)
    dense = read_layer_numbers(hf_config, "mlp_only_layers") or ()
    return tuple(
        layer_idx not in dense and (layer_idx + 1) % step == 0 for layer_idx in range(num_layers)
    )


def read_leading_dense(
    hf_config: Mapping[str, object], num_layers: int, *, default: int
) -> tuple[bool, ...]:
    """For each layer, whether it has experts: all after the first `first_k_dense_replace` do."""
    num_dense = read_count(hf_config, "first_k_dense_replace", default, minimum=0)
    return tuple(layer_idx >= num_dense for layer_idx in range(num_layers))


def read_mlp_layer_types(
    hf_config: Mapping[str, object], default: Sequence[bool]
) -> tuple[bool, ...]:
    """For each layer, whether it has experts: `mlp_layer_types`, "dense" or "sparse".

    Args:
        default: The result if config.json has no `mlp_layer_types`.

    Raises:
        ModelConfigError: `mlp_layer_types` is not a list with a known name for each layer.
    """
    written = hf_config.get("mlp_layer_types")
    if written is None:
        return tuple(default)
    if (
        not isinstance(written, list)
        or len(written) != len(default)
        or any(name not in ("dense", "sparse") for name in written)
    ):
        raise ModelConfigError(
            f"config.json: mlp_layer_types is {written!r}; expected a list of {len(default)} "
            "names, 'dense' or 'sparse', one for each layer."
        )
    return tuple(name == "sparse" for name in written)


def read_corrected_choice(
    hf_config: Mapping[str, object], expert_fields: Mapping[str, int]
) -> SigmoidTopK:
    """Reads how a model with a `CorrectedRouter` chooses experts.

    Args:
        expert_fields: The result of `read_expert_fields`.

    Raises:
        ModelConfigError: A field is of the wrong type, or `read_group_fields` raises it.
    """
    top_k = expert_fields["num_experts_per_tok"]
    return SigmoidTopK(
        top_k=top_k,
        normalizes=read_flag(hf_config, "norm_topk_prob", True),
        factor=read_number(hf_config, "routed_scaling_factor", 1.0),
        **read_group_fields(hf_config, num_experts=expert_fields["num_experts"], top_k=top_k),
    )


def read_group_fields(
    hf_config: Mapping[str, object], *, num_experts: int, top_k: int
) -> dict[str, int]:
    """Reads the groups of `SigmoidTopK`: there are `n_group`, of which `topk_group` are kept.

    The default is one group.

    Raises:
        ModelConfigError: The groups are of different sizes, a group has one expert only, or the
            kept groups have fewer experts than a token goes to.
    """
    num_groups = read_count(hf_config, "n_group", 1)
    num_kept = read_count(hf_config, "topk_group", 1)
    group_size = num_experts // num_groups
    if (
        num_experts % num_groups
        or num_kept > num_groups
        or num_kept * group_size < top_k
        or group_size < 2
    ):
        raise ModelConfigError(
            f"config.json: n_group={num_groups} and topk_group={num_kept} do not fit {num_experts} "
            f"experts, of which {top_k} are chosen. Groups must be of equal size, with at least "
            f"two experts each; the kept groups must have at least {top_k} experts together."
        )
    return {"num_groups": num_groups, "num_kept_groups": num_kept}

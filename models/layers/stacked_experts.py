"""Weight rules for checkpoints whose experts share one tensor per projection (DBRX, JetMoE)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from models.weight_rule import Source, WeightRule

# Makes the weights [num_experts, out, in] from the only tensor of a rule.
_Combine = Callable[[Sequence[np.ndarray]], np.ndarray]


def with_rows_of_experts(
    rules: Mapping[str, WeightRule], names: Mapping[str, str]
) -> dict[str, WeightRule]:
    """The rules for tensors [num_experts * inner width, hidden], as DBRX has them.

    Args:
        names: Name of each projection, such as "up_proj" -> the name in the checkpoint.
    """
    return {
        name: _rule_of_rows(rule, names) if rule.layout == "experts" else rule
        for name, rule in rules.items()
    }


def with_source(
    rule: WeightRule, name: str, shape: tuple[int, ...], combine: _Combine | None = None
) -> WeightRule:
    """The rule of experts that reads one tensor.

    Args:
        shape: Of the tensor.
        combine: None: the tensor is [num_experts, out, in] already.
    """
    return dataclasses.replace(rule, sources=(Source(name=name, shape=shape),), combine=combine)


def _rule_of_rows(rule: WeightRule, names: Mapping[str, str]) -> WeightRule:
    # "model.layers.0.mlp.experts.0.gate_proj.weight"
    owner, _, projection = rule.sources[0].name.removesuffix(".weight").rpartition(".")
    name = f"{owner.removesuffix('.0')}.{names[projection]}"
    num_experts, (out_features, in_features) = len(rule.sources), rule.sources[0].shape
    is_turned = projection == "down_proj"
    inner, hidden = (in_features, out_features) if is_turned else (out_features, in_features)
    combine = functools.partial(_split_rows, inner=inner, is_turned=is_turned)
    return with_source(rule, name, (num_experts * inner, hidden), combine)


def _split_rows(
    weights_np: Sequence[np.ndarray], *, inner: int, is_turned: bool
) -> np.ndarray:  # f[num_experts, out, in]
    (weight_np,) = weights_np
    by_expert = weight_np.reshape(-1, inner, weight_np.shape[-1])
    return by_expert.swapaxes(-1, -2) if is_turned else by_expert

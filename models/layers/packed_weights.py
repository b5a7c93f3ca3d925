"""Weight rules for checkpoints that join the weights of several projections into one tensor."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from models.config.attention_config import AttentionConfig
from models.weight_rule import Source, WeightRule


def with_packed_qkv(
    rules: Mapping[str, WeightRule],
    attention: Sequence[AttentionConfig],
    *,
    packed: str = "self_attn.qkv_proj",
) -> dict[str, WeightRule]:
    """The rules for checkpoints whose tensors hold the rows of q, then of k, then of v.

    Args:
        attention: Of each layer.
        packed: The module of the checkpoint that holds the rows.
    """
    changed = dict(rules)
    for layer_idx, layer in enumerate(attention):
        widths = {
            "self_attn.q_proj": layer.num_q_heads * layer.head_dim,
            "self_attn.k_proj": layer.num_kv_heads * layer.head_dim,
            "self_attn.v_proj": layer.num_kv_heads * layer.value_head_dim,
        }
        changed |= _rules_of_rows(rules, f"layers.{layer_idx}", widths, packed)
    return changed


def with_grouped_qkv(
    rules: Mapping[str, WeightRule],
    attention: Sequence[AttentionConfig],
    *,
    packed: str,
) -> dict[str, WeightRule]:
    """The rules for checkpoints whose tensors hold the rows of one KV head after the other.

    A KV head has the rows of its query heads, then of its key, then of its value.

    Args:
        attention: Of each layer. Values are as wide as keys.
        packed: The module of the checkpoint that holds the rows.
    """
    changed = dict(rules)
    for layer_idx, layer in enumerate(attention):
        num_queries = layer.num_q_heads // layer.num_kv_heads
        dims = (layer.num_kv_heads, num_queries + 2, layer.head_dim)
        parts = {
            "self_attn.q_proj": slice(0, num_queries),
            "self_attn.k_proj": slice(num_queries, num_queries + 1),
            "self_attn.v_proj": slice(num_queries + 1, num_queries + 2),
        }
        for projection, part in parts.items():
            for leaf in ("kernel", "bias"):
                name = f"layers.{layer_idx}.{projection}.{leaf}"
                if name in rules:
                    changed[name] = _rule_of_group(rules[name], projection, packed, dims, part)
    return changed


def _rule_of_group(
    rule: WeightRule, projection: str, packed: str, dims: tuple[int, int, int], part: slice
) -> WeightRule:
    (own,) = rule.sources
    rest = own.shape[1:]
    source = Source(name=own.name.replace(projection, packed), shape=(math.prod(dims), *rest))

    def combine(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(*dims, *rest)[:, part].reshape(own.shape)

    return dataclasses.replace(rule, sources=(source,), combine=combine)


def with_turned_matrices(rules: Mapping[str, WeightRule]) -> dict[str, WeightRule]:
    """The rules for checkpoints that store the matrices of layers as [in, out] (GPT-2)."""
    return {
        name: _turned(rule) if rule.layout == "matrix" and name.startswith("layers.") else rule
        for name, rule in rules.items()
    }


def _turned(rule: WeightRule) -> WeightRule:
    sources = tuple(
        dataclasses.replace(source, shape=source.shape[::-1]) for source in rule.sources
    )
    return dataclasses.replace(
        rule, sources=sources, combine=lambda arrays: rule.combined([array.T for array in arrays])
    )


def with_packed_gate_up(
    rules: Mapping[str, WeightRule],
    *,
    num_layers: int,
    intermediate_size: int,
    mlp: str = "mlp",
    packed: str = "gate_up_proj",
) -> dict[str, WeightRule]:
    """The rules for checkpoints whose tensors hold the rows of the gate, then the rows of up.

    Args:
        mlp: The name of the MLP in a layer.
        packed: The module of the MLP that holds the rows in the checkpoint.
    """
    widths = {f"{mlp}.gate_proj": intermediate_size, f"{mlp}.up_proj": intermediate_size}
    return with_packed_rows(rules, widths, num_layers=num_layers, packed=f"{mlp}.{packed}")


def with_packed_rows(
    rules: Mapping[str, WeightRule], widths: Mapping[str, int], *, num_layers: int, packed: str
) -> dict[str, WeightRule]:
    """The rules for checkpoints whose tensors hold the rows of several modules.

    Layers without these modules keep their rules.

    Args:
        widths: Module of a layer -> its number of rows, in the order of the tensor.
        packed: The module of the checkpoint that holds the rows.
    """
    changed = dict(rules)
    for layer_idx in range(num_layers):
        changed |= _rules_of_rows(rules, f"layers.{layer_idx}", widths, packed)
    return changed


def _rules_of_rows(
    rules: Mapping[str, WeightRule], layer: str, widths: Mapping[str, int], packed: str
) -> dict[str, WeightRule]:
    """The rules of projections that have consecutive rows of one tensor.

    Args:
        widths: Projection -> its number of rows, in the order of the tensor.
    """
    changed = {}
    start = 0
    for projection, width in widths.items():
        for leaf in ("kernel", "bias"):
            name = f"{layer}.{projection}.{leaf}"
            if name not in rules:
                continue
            (own,) = rules[name].sources
            source = Source(
                name=own.name.replace(projection, packed),
                shape=(sum(widths.values()), *own.shape[1:]),
            )
            rows = slice(start, start + width)
            changed[name] = dataclasses.replace(
                rules[name], sources=(source,), combine=lambda arrays, rows=rows: arrays[0][rows]
            )
        start += width
    return changed

"""`HybridShape`: shapes of Qwen3.5 and Bamba, with recurrent layers, for random checkpoints."""

import dataclasses
from collections.abc import Iterator

_ATTENTION_PERIOD = 4
_CONV_KERNEL = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape:
    """Every fourth layer has attention. The other layers are recurrent.

    Args:
        is_mamba2: True: the recurrent layers are Mamba2, and the model is a Bamba. False: they are
            Gated DeltaNet, and the model is a Qwen3.5.
        num_state_heads: Heads of a recurrent layer. With Gated DeltaNet, two of them share a key.
        state_head_dim: Width of these heads.
        state_key_dim: Rows of a head's state: the width of keys, or Mamba2's `mamba_d_state`.
    """

    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_mamba2: bool
    num_state_heads: int
    state_head_dim: int
    state_key_dim: int

    def config_fields(self) -> dict[str, object]:
        """The fields of config.json that describe the shape."""
        fields: dict[str, object] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "tie_word_embeddings": True,
        }
        if self.is_mamba2:
            return fields | {
                "architectures": ["BambaForCausalLM"],
                "model_type": "bamba",
                "attn_layer_indices": [i for i in range(self.num_layers) if self._attends(i)],
                "mamba_n_heads": self.num_state_heads,
                "mamba_d_head": self.state_head_dim,
                "mamba_d_state": self.state_key_dim,
                "mamba_n_groups": 1,
                "mamba_d_conv": _CONV_KERNEL,
                "mamba_expand": self._inner_width // self.hidden_size,
                "mamba_chunk_size": 64,
            }
        return fields | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "head_dim": self.head_dim,
            "layer_types": [
                "full_attention" if self._attends(i) else "linear_attention"
                for i in range(self.num_layers)
            ],
            "linear_num_key_heads": self.num_state_heads // 2,
            "linear_num_value_heads": self.num_state_heads,
            "linear_key_head_dim": self.state_key_dim,
            "linear_value_head_dim": self.state_head_dim,
            "linear_conv_kernel_dim": _CONV_KERNEL,
        }

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight, in a fixed order; matrices are [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        last_norm, mlp_norm, mlp = "norm", "post_attention_layernorm", "mlp"
        if self.is_mamba2:
            last_norm, mlp_norm, mlp = "final_layernorm", "pre_ff_layernorm", "feed_forward"
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            mixer = self._delta_net_shapes
            if self._attends(layer_idx):
                mixer = self._attention_shapes
            elif self.is_mamba2:
                mixer = self._mamba2_shapes
            for name, weight_shape in (
                ("input_layernorm.weight", (hidden,)),
                *mixer(),
                (f"{mlp_norm}.weight", (hidden,)),
                (f"{mlp}.gate_proj.weight", (inner, hidden)),
                (f"{mlp}.up_proj.weight", (inner, hidden)),
                (f"{mlp}.down_proj.weight", (hidden, inner)),
            ):
                yield f"model.layers.{layer_idx}.{name}", weight_shape
        yield f"model.{last_norm}.weight", (hidden,)

    @property
    def _inner_width(self) -> int:
        return self.num_state_heads * self.state_head_dim

    def _attends(self, layer_idx: int) -> bool:
        return layer_idx % _ATTENTION_PERIOD == _ATTENTION_PERIOD - 1

    def _attention_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # Qwen3.5 has a gate for each number of the heads' output, and norms of queries and keys.
        yield "self_attn.q_proj.weight", (q_width if self.is_mamba2 else 2 * q_width, hidden)
        yield "self_attn.k_proj.weight", (kv_width, hidden)
        yield "self_attn.v_proj.weight", (kv_width, hidden)
        yield "self_attn.o_proj.weight", (hidden, q_width)
        if not self.is_mamba2:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)

    def _delta_net_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, heads, inner = self.hidden_size, self.num_state_heads, self._inner_width
        conv_width = heads * self.state_key_dim + inner  # queries, keys and values
        yield "linear_attn.in_proj_qkv.weight", (conv_width, hidden)
        yield "linear_attn.in_proj_z.weight", (inner, hidden)
        yield "linear_attn.in_proj_b.weight", (heads, hidden)
        yield "linear_attn.in_proj_a.weight", (heads, hidden)
        yield "linear_attn.conv1d.weight", (conv_width, 1, _CONV_KERNEL)
        yield "linear_attn.dt_bias", (heads,)
        yield "linear_attn.A_log", (heads,)
        yield "linear_attn.norm.weight", (self.state_head_dim,)
        yield "linear_attn.out_proj.weight", (hidden, inner)

    def _mamba2_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, heads, inner = self.hidden_size, self.num_state_heads, self._inner_width
        conv_width = inner + 2 * self.state_key_dim
        yield "mamba.in_proj.weight", (inner + conv_width + heads, hidden)
        yield "mamba.conv1d.weight", (conv_width, 1, _CONV_KERNEL)
        yield "mamba.conv1d.bias", (conv_width,)
        yield "mamba.dt_bias", (heads,)
        yield "mamba.A_log", (heads,)
        yield "mamba.D", (heads,)
        yield "mamba.norm.weight", (inner,)
        yield "mamba.out_proj.weight", (hidden, inner)

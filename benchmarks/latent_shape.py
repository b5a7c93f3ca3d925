"""`LatentShape`: shapes of DeepSeek V3, with latent attention, for random checkpoints."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """A DeepSeek V3. The first layer has an MLP, the others have experts and a shared expert.

    Args:
        q_lora_rank: Width of compressed queries.
        kv_lora_rank: Width of a latent, which is cached together with a rotary key.
        nope_head_dim: Width of a query or key of one head, without its rotary part.
        intermediate_size: Inside the MLP.
        moe_intermediate_size: Inside one expert, and inside the shared expert.
        n_group: Groups of experts. A token goes to experts of half of them.
        num_experts_per_tok: Experts that a token goes to, without the shared expert.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    n_group: int
    num_experts_per_tok: int
    vocab_size: int

    def config_fields(self) -> dict[str, object]:
        """The fields of config.json that describe the shape."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hidden_layers": self.num_layers,
            "first_k_dense_replace": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_head_dim,
            "qk_rope_head_dim": self.rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_group": self.n_group,
            "topk_group": self.n_group // 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_theta": 10_000.0,
            "rope_interleave": True,
            "tie_word_embeddings": False,
        }

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight, in a fixed order; matrices are [out, in]."""
        hidden = self.hidden_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            for name, weight_shape in (
                ("input_layernorm.weight", (hidden,)),
                *self._attention_weight_shapes(),
                ("post_attention_layernorm.weight", (hidden,)),
                *self._mlp_weight_shapes(has_experts=layer_idx > 0),
            ):
                yield f"model.layers.{layer_idx}.{name}", weight_shape
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def _attention_weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, heads, latent = self.hidden_size, self.num_heads, self.kv_lora_rank
        for name, weight_shape in (
            ("q_a_proj", (self.q_lora_rank, hidden)),
            ("q_a_layernorm", (self.q_lora_rank,)),
            ("q_b_proj", (heads * (self.nope_head_dim + self.rope_head_dim), self.q_lora_rank)),
            ("kv_a_proj_with_mqa", (latent + self.rope_head_dim, hidden)),
            ("kv_a_layernorm", (latent,)),
            ("kv_b_proj", (heads * (self.nope_head_dim + self.v_head_dim), latent)),
            ("o_proj", (hidden, heads * self.v_head_dim)),
        ):
            yield f"self_attn.{name}.weight", weight_shape

    def _mlp_weight_shapes(self, *, has_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        owners = {"mlp": self.intermediate_size}
        if has_experts:
            yield "mlp.gate.weight", (self.num_experts, hidden)
            yield "mlp.gate.e_score_correction_bias", (self.num_experts,)
            names = [f"experts.{expert}" for expert in range(self.num_experts)]
            names.append("shared_experts")
            owners = {f"mlp.{name}": self.moe_intermediate_size for name in names}
        for owner, inner in owners.items():
            yield f"{owner}.gate_proj.weight", (inner, hidden)
            yield f"{owner}.up_proj.weight", (inner, hidden)
            yield f"{owner}.down_proj.weight", (hidden, inner)

"""`Eagle3Head`: a layer over hidden states of several layers of the target.

Source: EAGLE-3, arXiv:2503.01840, and the reference code at github.com/SafeAILab/EAGLE.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.config.eagle3_config import Eagle3Config
from models.drafters.draft_head import DraftHead
from models.forward.layer_context import LayerContext, LayerPlaces
from models.layers.attention import Attention
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import RMSNorm
from models.weight_rule import Source, WeightRule, rules_of_layers


class Eagle3Layer(nnx.Module):
    """Attention over embeddings and hidden states side by side, then an MLP.

    Only the hidden states are in the residual stream.
    """

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype) -> None:
        hidden_size = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        self.norms_residual = config.norms_residual
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.self_attn = _WideAttention(config.attention[0], dtype=dtype)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            hidden_size, config.intermediate_size, activation=config.hidden_act, dtype=dtype
        )

    def __call__(
        self,
        embedded: jax.Array,  # f[num_tokens, hidden]
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_tokens, hidden]
        joined = jnp.concatenate([embedded, hidden], axis=-1)
        attended, pages = self.self_attn(joined, pages, context, norm=self._norm_halves)
        residual = self.hidden_norm(hidden) if self.norms_residual else hidden
        return context.by_token(self._add_parts, residual, attended), pages

    def _norm_halves(self, joined: jax.Array) -> jax.Array:  # f[num_rows, 2 * hidden], both
        embedded, hidden = jnp.split(joined, 2, axis=-1)
        return jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(hidden)], axis=-1)

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        hidden = hidden + self.self_attn.project_out(attended, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden), context)


class _WideAttention(Attention):
    """Attention whose input is twice as wide as its output."""

    def __init__(self, config: AttentionConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(replace(config, hidden_size=2 * config.hidden_size), dtype=dtype)
        self.o_proj = Linear(
            config.num_q_heads * config.value_head_dim,
            config.hidden_size,
            axes=("heads", None),
            use_bias=config.out_bias,
            dtype=dtype,
        )


class Eagle3Head(DraftHead):
    """The layer, and a vocabulary head that knows the most frequent tokens of the target.

    Without an embedding in the checkpoint, the head shares that of the target.
    """

    def __init__(self, config: Eagle3Config, *, has_embedding: bool, dtype: jnp.dtype) -> None:
        """Makes the head with weights to be filled in.

        Args:
            has_embedding: Whether the head has an embedding of its own.
        """
        self.embed_tokens = (
            Embedding(config.vocab_size, config.hidden_size, dtype=dtype) if has_embedding else None
        )
        num_inputs = len(config.taps) * config.target_hidden_size
        self.fc = Linear(num_inputs, config.hidden_size, dtype=dtype)
        self.midlayer = Eagle3Layer(config, dtype=dtype)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(
            config.hidden_size, config.draft_vocab_size, axes=(None, "vocab"), dtype=dtype
        )
        # The target's number of each token that the head can propose. None: they are the same.
        self.target_ids = (
            nnx.Param(jnp.zeros(config.draft_vocab_size, jnp.int32))
            if config.draft_vocab_size != config.vocab_size
            else None
        )

    def embed(
        self, token_ids: jax.Array, target_embed: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        embed = target_embed if self.embed_tokens is None else self.embed_tokens
        return embed(token_ids)

    def combine(self, hidden: jax.Array) -> jax.Array:
        return self.fc.product(hidden).astype(hidden.dtype)

    def run(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        pages: Pages,
        context: LayerContext,
        places: Sequence[LayerPlaces],
    ) -> tuple[jax.Array, Pages]:
        (own_places,) = places
        return self.midlayer(embedded, hidden, pages, context.at(0, own_places))

    def choose(
        self,
        hidden: jax.Array,
        target_logits: Callable[[jax.Array], jax.Array],
        argmax: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        draft_ids = argmax(self.lm_head.product(self.norm(hidden)))
        return draft_ids if self.target_ids is None else self.target_ids[...][draft_ids]

    def weight_rules(self) -> Mapping[str, WeightRule]:
        rules = rules_of_layers(self, prefix="")
        if self.target_ids is not None:
            num_ids = self.target_ids.get_value().shape[0]
            distance = Source(name="d2t", shape=(num_ids,), is_integer=True)
            rules["target_ids"] = WeightRule(
                sources=(distance,), layout="vector", axes=(None,), combine=_add_places
            )
        return rules

    def ignores_weight(self, name: str) -> bool:
        """The table of the tokens that have a draft token, which training needs."""
        return name.rpartition(".")[2] in ("t2d", "d2t")

    def name_weight(self, name: str) -> str:
        """The layer is `layers.0` in checkpoints of speculators."""
        return name.replace("layers.0.", "midlayer.", 1)


def _add_places(distances_np: Sequence[np.ndarray]) -> np.ndarray:  # i[num_ids]
    """`d2t` stores the distance of each token from its number in the target."""
    (distance_np,) = distances_np
    return np.arange(len(distance_np)) + distance_np

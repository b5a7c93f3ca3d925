"""The EAGLE-3 head of the demo model in flax, for training: packed rows, no cache.

Source: EAGLE-3, arXiv:2503.01840, with its training-time test: the head also learns from its own
hidden states, which it reads when it drafts several tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.demo.training_model import MLP, DemoModel, DemoModelConfig, attention_mask, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of the head. With these, its 16-bit weights need less than 400 KB.

    Args:
        layer_ids: Layers of the model whose inputs the head reads, counted from 0. The number of
            layers stands for the output of the last one.
        draft_vocab_size: Tokens that the head can propose.
    """

    layer_ids: tuple[int, ...] = (2, 4)
    draft_vocab_size: int = 128
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    intermediate_size: int = 64


class _Keys(NamedTuple):
    keys: jax.Array  # f32[num_rows, row_length, head_dim]
    values: jax.Array  # f32[num_rows, row_length, head_dim]


class HeadModel(nnx.Module):
    """Attributes are named as in the checkpoint, without `midlayer`.

    Args:
        draft_ids_np: i32[draft_vocab_size], the token of each logit.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: DemoModel,
        draft_ids_np: np.ndarray,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = target.config
        hidden, head_dim = sizes.hidden_size, sizes.head_dim
        init = nnx.initializers.normal(sizes.initializer_range)

        def linear(num_inputs: int, num_outputs: int) -> nnx.Linear:
            return nnx.Linear(num_inputs, num_outputs, use_bias=False, kernel_init=init, rngs=rngs)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(hidden, epsilon=sizes.rms_norm_eps, rngs=rngs)

        self.config, self.sizes = config, sizes
        self.fc = linear(len(config.layer_ids) * hidden, hidden)
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.q_proj = linear(2 * hidden, config.num_attention_heads * head_dim)
        self.k_proj = linear(2 * hidden, config.num_key_value_heads * head_dim)
        self.v_proj = linear(2 * hidden, config.num_key_value_heads * head_dim)
        self.o_proj = linear(config.num_attention_heads * head_dim, hidden)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(_mlp_sizes(config, sizes), rngs=rngs)
        self.norm = norm()
        self.lm_head = linear(hidden, config.draft_vocab_size)
        # It starts as the model's own last layer and vocabulary head.
        self.fc.kernel.set_value(
            jnp.eye(self.fc.kernel.shape[0], hidden, k=hidden - self.fc.kernel.shape[0])
        )
        self.norm.scale.set_value(target.norm.scale[...])
        self.lm_head.kernel.set_value(target.embed_tokens.embedding[...][draft_ids_np].T)

    def __call__(
        self,
        target_hidden: jax.Array,  # f32[num_rows, row_length, num_layer_ids * hidden]
        embedded: jax.Array,  # f32[num_rows, row_length, hidden], of the tokens
        positions: jax.Array,  # i32[num_rows, row_length]
        segment_ids: jax.Array,  # i32[num_rows, row_length]
        num_drafts: int,
    ) -> list[jax.Array]:  # f32[num_rows, row_length, draft_vocab], one for each draft
        """Logits of the drafts after every token, if the drafts before them are the next tokens.

        Draft i of token t predicts token t + 2 + i.
        """
        mask, hidden = attention_mask(segment_ids), self.fc(target_hidden)
        found: list[jax.Array] = []
        earlier: list[_Keys] = []
        for draft_idx in range(num_drafts):
            next_embedded = jnp.roll(embedded, -1 - draft_idx, axis=1)
            hidden, keys = self._layer(next_embedded, hidden, positions + draft_idx, mask, earlier)
            earlier.append(keys)
            found.append(self.lm_head(self.norm(hidden)))
        return found

    def _layer(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        mask: jax.Array,  # bool[num_rows, row_length, row_length]
        earlier: list[_Keys],
    ) -> tuple[jax.Array, _Keys]:
        """Runs the layer for one draft of every token.

        Args:
            earlier: Keys and values of the drafts before this one. A token attends to the first
                draft's at all positions up to its own, and to other drafts' only at its own.
        """
        num_heads, head_dim = self.config.num_attention_heads, self.sizes.head_dim
        x = jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(hidden)], axis=-1)
        q = self.q_proj(x).reshape(*x.shape[:2], num_heads, head_dim)
        q = rotate(q, positions, self.sizes.rope_theta) * head_dim**-0.5
        k = rotate(self.k_proj(x)[:, :, None], positions, self.sizes.rope_theta)[:, :, 0]
        of_drafts = [*earlier, _Keys(k, self.v_proj(x))]
        scores = [
            jnp.where(mask[:, None], jnp.einsum("rqhd,rtd->rhqt", q, of_drafts[0].keys), -1e30)
        ]
        scores += [jnp.einsum("rqhd,rqd->rhq", q, own.keys)[..., None] for own in of_drafts[1:]]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        length = x.shape[1]
        out = jnp.einsum("rhqt,rtd->rqhd", weights[..., :length], of_drafts[0].values)
        for idx, own in enumerate(of_drafts[1:]):
            share = jnp.moveaxis(weights[..., length + idx], 1, 2)[..., None]
            out += share * own.values[:, :, None]
        hidden = hidden + self.o_proj(out.reshape(*x.shape[:2], -1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), of_drafts[-1]


def _mlp_sizes(config: HeadConfig, sizes: DemoModelConfig) -> DemoModelConfig:
    return DemoModelConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        initializer_range=sizes.initializer_range,
    )

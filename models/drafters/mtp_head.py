"""`MTPHead`: a layer for multi-token prediction, which checkpoints have after the model's layers.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.config.model_config import ModelConfig
from models.config.moe_config import MoEConfig
from models.decoders.layer_loop import Layer, PlacedLayer
from models.drafters.draft_head import DraftHead
from models.errors import UnsupportedModelError
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext, LayerPlaces
from models.layers.linear import Linear
from models.layers.rms_norm import RMSNorm
from models.registry import family_class
from models.weight_rule import WeightRule, rules_of_layers, with_renamed_sources

# Architectures whose layers for multi-token prediction have the form of this file.
_ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")


class MTPHead(DraftHead):
    """One layer of the model over a projection of hidden states and embeddings.

    A checkpoint may have several of these layers, one for each further token. The head is the first
    of them, and predicts all further tokens. The embedding and the vocabulary head belong to the
    target: checkpoints have equal copies of them, which are not loaded.
    """

    def __init__(
        self, *, layer: Layer, layer_idx: int, hidden_size: int, eps: float, dtype: jnp.dtype
    ) -> None:
        """Makes the head with weights to be filled in.

        Args:
            layer_idx: The number of the layer in the checkpoint.
            eps: Of the norms.
        """
        self.layer_idx = layer_idx
        self.enorm = RMSNorm(hidden_size, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(hidden_size, eps=eps, dtype=dtype)
        self.eh_proj = Linear(2 * hidden_size, hidden_size, dtype=dtype)
        self.layer = layer
        self.norm = RMSNorm(hidden_size, eps=eps, dtype=dtype)

    def run(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        pages: Pages,
        context: LayerContext,
        places: Sequence[LayerPlaces],
    ) -> tuple[jax.Array, Pages]:
        joined = jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1)
        carry = Carry(hidden=context.by_token(self.eh_proj, joined))
        (own_places,) = places
        carry, pages = PlacedLayer(self.layer, 0, own_places).run(carry, pages, context)
        return self.norm(carry.hidden), pages

    def choose(
        self,
        hidden: jax.Array,
        target_logits: Callable[[jax.Array], jax.Array],
        argmax: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        return argmax(target_logits(hidden))

    def weight_rules(self) -> Mapping[str, WeightRule]:
        def rename(name: str) -> str:
            in_head = name.startswith("norm.")
            return f"{self._prefix}{'shared_head.' * in_head}{name.removeprefix('layer.')}"

        return with_renamed_sources(rules_of_layers(self, prefix=""), rename)

    def ignores_weight(self, name: str) -> bool:
        """All tensors of the target, and the copies of its embedding and of its head."""
        shared = ("embed_tokens.weight", "shared_head.head.weight")
        return not name.startswith(self._prefix) or name.removeprefix(self._prefix) in shared

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.layer_idx}."


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The config of the head of a model, as of a model with one layer.

    Raises:
        UnsupportedModelError: The model has no such layer, or of a form that is not supported.
    """
    if config.architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"method 'mtp' does not support {config.architecture}; it supports "
            f"{', '.join(_ARCHITECTURES)}. Use another method."
        )
    if not config.num_mtp_layers:
        raise UnsupportedModelError(
            "method 'mtp' needs a checkpoint with layers for multi-token prediction; config.json "
            "has none (num_nextn_predict_layers). Use another method."
        )
    assert isinstance(config, MoEConfig)
    return replace(
        config,
        num_layers=1,
        attention=config.attention[-1:],
        has_experts=(True,),
        tie_word_embeddings=False,
    )


def make_mtp_head(config: ModelConfig, *, layer_idx: int, dtype: jnp.dtype) -> MTPHead:
    """Makes the head with weights to be filled in.

    Args:
        config: From `mtp_config`.
        layer_idx: The number of the layer in the checkpoint.
    """
    model = family_class(config.architecture)(config, has_head_kernel=True, dtype=dtype)
    return MTPHead(
        layer=model.layers[0],
        layer_idx=layer_idx,
        hidden_size=config.hidden_size,
        eps=config.rms_norm_eps,
        dtype=dtype,
    )

"""`MTPHead`: a layer for multi-token prediction in the checkpoint of the model.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.model_config import ModelConfig
from models.config.moe_config import MoEConfig
from models.decoders.layer_loop import PlacedLayer
from models.drafters.draft_head import DraftHead
from models.errors import UnsupportedModelError
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext, LayerPlaces
from models.layers.linear import Linear
from models.layers.rms_norm import RMSNorm
from models.registry import family_class
from models.weight_rule import WeightRule, rules_of_layers, with_renamed_sources


class MTPHead(DraftHead):
    """One layer of the model over a projection of hidden states and embeddings.

    A checkpoint may have several of these layers, one for each further token. The head is the first
    of them, and predicts all further tokens. The embedding and the vocabulary head belong to the
    target. Equal copies of them in checkpoints are not loaded.
    """

    norm_class: ClassVar[type[nnx.Module]] = RMSNorm

    def __init__(self, config: ModelConfig, *, prefix: str, dtype: jnp.dtype) -> None:
        """Makes the head with weights to be filled in.

        Args:
            config: From `config_of`.
            prefix: The result of `prefix_of`.
        """

        def norm() -> nnx.Module:
            return self.norm_class(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        model = family_class(config.architecture)(config, has_head_kernel=True, dtype=dtype)
        self.prefix = prefix
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, dtype=dtype)
        self.layer = model.layers[0]
        self.norm = norm()

    @classmethod
    def prefix_of(cls, target: ModelConfig) -> str:
        """The start of the names of the head's tensors in the checkpoint of its target."""
        return f"model.layers.{target.num_layers}."

    @classmethod
    def taps_of(cls, target: ModelConfig) -> tuple[int, ...]:
        """The layers of the target whose hidden states the head reads, as in `LoadedHead`."""
        return ()

    @classmethod
    def config_of(cls, target: ModelConfig) -> ModelConfig:
        """The config of the head of a model, as of a model with one layer.

        Raises:
            UnsupportedModelError: The model has no such layer.
        """
        if not target.num_mtp_layers:
            raise UnsupportedModelError(
                "method 'mtp' needs a checkpoint with layers for multi-token prediction; "
                "config.json has none (num_nextn_predict_layers). Use another method."
            )
        return one_layer(target)

    def run(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        pages: Pages,
        context: LayerContext,
        places: Sequence[LayerPlaces],
    ) -> tuple[jax.Array, Pages]:
        carry = Carry(hidden=context.by_token(self.eh_proj, self.join(embedded, hidden)))
        (own_places,) = places
        carry, pages = PlacedLayer(self.layer, 0, own_places).run(carry, pages, context)
        return self.norm(carry.hidden), pages

    def join(
        self,
        embedded: jax.Array,  # f[num_tokens, hidden]
        hidden: jax.Array,  # f[num_tokens, hidden]
    ) -> jax.Array:  # f[num_tokens, 2 * hidden]
        """Returns the input of `eh_proj`."""
        return jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1)

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
            return f"{self.prefix}{'shared_head.' * in_head}{name.removeprefix('layer.')}"

        return with_renamed_sources(rules_of_layers(self, prefix=""), rename)

    def ignores_weight(self, name: str) -> bool:
        """All tensors of the target, and the copies of its embedding and of its head."""
        shared = ("embed_tokens.weight", "shared_head.head.weight")
        return not name.startswith(self.prefix) or name.removeprefix(self.prefix) in shared


def one_layer(target: ModelConfig) -> ModelConfig:
    """The config of a model whose only layer is the last layer with attention of the target.

    The layer has experts if layers of the target may have some.
    """
    attention = [layer for layer in target.attention if layer is not None][-1:]
    experts = {"has_experts": (True,)} if isinstance(target, MoEConfig) else {}
    return replace(
        target,
        num_layers=1,
        attention=tuple(attention),
        tie_word_embeddings=False,
        **experts,
    )

"""`Decoder`: the parts around the layers, which all families have."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.model_config import ModelConfig
from models.decoders.layer_loop import Layer, PlacedLayer
from models.errors import UnsupportedModelError
from models.forward.carry import Carry
from models.forward.forward_batch import ForwardBatch
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import ContextChange, LayerContext, LayerPlaces, make_context
from models.forward.report import first_reports
from models.forward.wants import Outputs
from models.layers.linear import Embedding, Linear
from models.platforms import Platform
from models.weight_rule import WeightRule, rules_of_layers


class Decoder(nnx.Module):
    """Token embedding, decoder layers, final norm and vocabulary head.

    Families derive from it (`models/families/`). Attributes are named as in Hugging Face
    checkpoints, or the family maps their names (`weight_rules`).
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> ModelConfig:
        """Reads the family's config.json. Raises as `models.registry.read_config`."""
        raise UnsupportedModelError(
            f"the model class {cls.__module__}.{cls.__name__} cannot read a config.json; it has to "
            "define `read_config`. Report this to its author."
        )

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: Sequence[Layer],
        norm: nnx.Module,
        has_head_kernel: bool,
        dtype: jnp.dtype,
        embedding_scale: float = 1.0,
    ) -> None:
        """Makes the model with weights to be filled in.

        A family's own `__init__` takes `(config, *, has_head_kernel, dtype)`.

        Args:
            layers: `config.num_layers` of them. A module that is in the list several times runs
                at each of these places, with a cache of its own at each. Its weights exist once,
                under the name of its first place.
            norm: The norm of the last layer's hidden states.
            has_head_kernel: Whether the vocabulary head has an array of its own. Without tied
                embeddings it must; with them it may, as a transposed copy.
            embedding_scale: Factor of token embeddings on their way in.
        """
        self.config = config
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, scale=embedding_scale
        )
        self.layers = nnx.List(layers)
        self.norm = norm
        self.lm_head = (
            Linear(config.hidden_size, config.vocab_size, axes=(None, "vocab"), dtype=dtype)
            if has_head_kernel
            else None
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """The weight rule of every parameter; a family overrides rules that do not fit it."""
        rules = rules_of_layers(self, prefix="model.")
        if self.lm_head is not None:
            # A checkpoint with tied embeddings has no head, and this one is a transposed copy.
            name = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
            head_rules = self.lm_head.weight_rules(name)
            rules |= {f"lm_head.{leaf}": rule for leaf, rule in head_rules.items()}
        return rules

    def ignores_weight(self, name: str) -> bool:
        """Whether a tensor of that name may be in a checkpoint although no parameter needs it."""
        return False

    def name_weight(self, name: str) -> str:
        """The name that weight rules have for a tensor that is stored under this name.

        A family overrides it if checkpoints have other names on the hub than transformers writes.
        """
        return name

    def __call__(
        self,
        batch: ForwardBatch,
        pages: Pages,
        kernels: KernelSettings,
        platform: Platform,
        places: Sequence[LayerPlaces],
        change_context: ContextChange | None = None,
    ) -> tuple[Outputs, Pages]:
        """Runs one step's tokens through all layers; returns what `batch.wants` asks for.

        Args:
            places: The places of the caches of each layer.
            change_context: As in `LoadedModel.forward`.
        """
        batch.wants.check_taps(len(self.layers))
        rotaries = dict.fromkeys(layer.rotary for layer in self.config.attention_layers)
        context = self.prepare(make_context(batch, pages, kernels, rotaries))
        if change_context is not None:
            context = change_context(context)
        context = context.with_reported(first_reports(batch.wants.reports, len(self.layers)))
        layers = [
            PlacedLayer(layer, layer_idx, of_layer)
            for layer_idx, (layer, of_layer) in enumerate(zip(self.layers, places, strict=True))
        ]
        carry = self.embed(context)
        taps = []
        start = 0
        for tap in batch.wants.taps:
            carry, pages = platform.run_layers(layers[start : tap + 1], carry, pages, context)
            taps.append(self.tap(carry))
            start = tap + 1
        if start < len(layers):
            carry, pages = platform.run_layers(layers[start:], carry, pages, context)
        outputs = batch.choose_outputs(self.finish(carry), tuple(taps))
        return replace(outputs, reports=context.reported), pages

    def prepare(self, context: LayerContext) -> LayerContext:
        """The context that the embedding and all layers see, before features change it."""
        return context

    def embed(self, context: LayerContext) -> Carry:
        """The input of the first layer."""
        hidden = self.embed_tokens(context.batch.token_ids)
        if context.embeddings is not None:
            hidden = context.embeddings.replace_in(hidden)
        return Carry(hidden=hidden)

    def tap(self, carry: Carry) -> jax.Array:  # f[num_tokens, hidden]
        """A layer's own hidden states, for `Wants.taps`."""
        return carry.hidden

    def finish(self, carry: Carry) -> jax.Array:  # f[num_queries, hidden]
        """Hidden states after the last norm."""
        return self.norm(carry.hidden)

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        if self.lm_head is None:
            return self.embed_tokens.attend(hidden, kernels)
        return self.lm_head.product(hidden, kernels)

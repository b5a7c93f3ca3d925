"""`LoadedModel`: a model split into static structure and a flat tuple of arrays."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from models.cache.format import Pages
from models.forward.forward_batch import ForwardBatch
from models.forward.layer_context import ContextChange
from models.forward.wants import Outputs
from models.loading.loaded_module import LoadedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(LoadedModule):
    """A model ready to run."""

    # Rows of the vocabulary without a token, in ascending order (`without_tokens`).
    unused_token_ids: tuple[int, ...] = ()

    def without_tokens(self, token_ids: Iterable[int]) -> "LoadedModel":
        """The same model that never generates these tokens: their logits are -inf.

        A vocabulary is often padded to a round size. The padding has weights, so its rows would be
        sampled now and then. Tokens that end an answer are kept.
        """
        unused = {i for i in token_ids if 0 <= i < self.config.vocab_size}
        unused.difference_update(self.config.eos_token_ids)
        return dataclasses.replace(self, unused_token_ids=tuple(sorted(unused)))

    def forward(
        self,
        params: tuple[jax.Array, ...],
        pages: Pages,
        batch: ForwardBatch,
        change_context: ContextChange | None = None,
    ) -> tuple[Outputs, Pages]:
        """Runs the decoder over one step's tokens.

        Args:
            change_context: Gives the context that the embedding and all layers see, of the usual
                one. None leaves it as it is.

        Returns:
            What `batch.wants` asks for, and the cache with this step's keys and values written.

        Raises:
            ModelError: The layers have no places in the cache yet, or places that this batch or
                this cache does not have; or `batch.wants` names layers that the model does not
                have.
        """
        self._check_places(batch, pages)
        arguments = (batch, pages, self.kernels, self.platform, self.places, change_context)
        return self._merge(params)(*arguments)

    def embed(
        self,
        params: tuple[jax.Array, ...],
        token_ids: jax.Array,  # i32[num_tokens]
    ) -> jax.Array:  # f[num_tokens, hidden]
        """Embeds tokens, for a drafter that shares the model's embedding."""
        return self._merge(params).embed_tokens(token_ids)

    def compute_logits(
        self,
        params: tuple[jax.Array, ...],
        hidden: jax.Array,  # f[num_logits, hidden]
    ) -> jax.Array:  # f32[num_logits, vocab]
        """Projects hidden states, `Outputs.for_logits`, onto the vocabulary."""
        logits = self._merge(params).compute_logits(hidden, self.kernels)
        logits = self.kernels.split_last(logits, "vocab")
        if not self.unused_token_ids:
            return logits
        is_used_np = np.ones(logits.shape[-1], bool)
        is_used_np[list(self.unused_token_ids)] = False
        return jnp.where(is_used_np, logits, -jnp.inf)

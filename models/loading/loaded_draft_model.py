"""`LoadedDraftModel`: a smaller model that drafts for its target, with the methods of a head."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax

from models.cache.format import Pages
from models.cache.kept_states import KeptStates, read_written_states, write_states_back
from models.config.model_config import ModelConfig
from models.errors import ModelConfigError
from models.forward.forward_batch import ForwardBatch
from models.forward.wants import Wants
from models.loading.loaded_head import LoadedHead
from models.loading.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraftModel(LoadedModel):
    """A model that drafts from the tokens alone, without hidden states of its target."""

    taps: ClassVar[tuple[int, ...]] = ()
    reads_hidden: ClassVar[bool] = False

    @classmethod
    def of_model(cls, model: LoadedModel, target: LoadedModel) -> "LoadedDraftModel":
        """Makes a drafter for `target` from a loaded model.

        Raises:
            ModelError: As `check_draft_model`.
        """
        check_draft_model(model.config, target.config)
        fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        return cls(**fields | {"unused_token_ids": target.unused_token_ids})

    def run(
        self,
        params: tuple[jax.Array, ...],
        pages: Pages,
        batch: ForwardBatch,
    ) -> tuple[jax.Array, Pages]:  # f[num_tokens, hidden]
        """Runs the model over the tokens of the batch, and returns hidden states of all of them."""
        wants = Wants(logits="none", hidden="all")
        outputs, pages = self.forward(params, pages, dataclasses.replace(batch, wants=wants))
        return outputs.hidden, pages

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent layers."""
        return _has_states(self.config)

    def keep_states(self, pages: Pages, batch: ForwardBatch) -> KeptStates:
        """Returns the states after `run`, for `restore_states`. See `read_written_states`."""
        return read_written_states(pages, batch, self.places, self.kernels)

    def restore_states(self, pages: Pages, batch: ForwardBatch, kept: KeptStates) -> Pages:
        """Restores the states that `keep_states` returned for the same batch."""
        return write_states_back(pages, batch, self.places, self.kernels, kept)

    def choose(
        self,
        params: tuple[jax.Array, ...],
        hidden: jax.Array,  # f[num_rows, hidden]
        target_logits: Callable[[jax.Array], jax.Array],
        argmax: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # i32[num_rows]
        """Returns the most likely token of each row. See `DraftHead.choose`."""
        return argmax(self.compute_logits(params, hidden))


def check_draft_model(config: ModelConfig, target: ModelConfig) -> None:
    """Checks that a model can draft for its target.

    Raises:
        ModelConfigError: The vocabularies have different sizes.
    """
    if config.vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"the draft model has vocab_size {config.vocab_size}; the model has "
            f"{target.vocab_size}. Use a draft model with the same tokenizer."
        )


def _has_states(config: ModelConfig) -> bool:
    return any(cache.kind == "state" for cache in config.spec("float32").own_formats.values())


# A module that runs after each step, and proposes tokens for the next step.
LoadedDrafter = LoadedHead | LoadedDraftModel

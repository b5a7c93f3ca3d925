"""Whether a checkpoint's vocabulary head is its embedding, where config.json says so."""

import logging

import numpy as np

from models.loading.check_weights import READABLE_DTYPES
from models.loading.safetensors_reader import SafetensorsCheckpoint

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"

logger = logging.getLogger(__name__)


def is_head_tied(checkpoint: SafetensorsCheckpoint, *, tie_word_embeddings: bool) -> bool:
    """`tie_word_embeddings`, but False where a head of other numbers than the embedding is stored.

    Whoever trains the head alone, or merges an adapter into it, often leaves the flag as it was.

    Source: transformers 5, `PreTrainedModel.tie_weights`.
    """
    has_both = {EMBEDDING_WEIGHT, HEAD_WEIGHT} <= checkpoint.weights.keys()
    if not tie_word_embeddings or not has_both:
        return tie_word_embeddings
    if _are_equal(checkpoint):
        return True
    logger.warning(
        "%s: config.json ties %s to %s, and the two differ: the head is taken as it is stored. "
        "Set tie_word_embeddings to false in config.json.",
        *(checkpoint.folder, HEAD_WEIGHT, EMBEDDING_WEIGHT),
    )
    return False


def _are_equal(checkpoint: SafetensorsCheckpoint) -> bool:
    stored = [checkpoint.weights[name] for name in (HEAD_WEIGHT, EMBEDDING_WEIGHT)]
    # What cannot be read or has another shape is named by `check_weights`, later.
    if stored[0].shape != stored[1].shape or {w.dtype for w in stored} - {*READABLE_DTYPES}:
        return False
    return np.array_equal(checkpoint.read(HEAD_WEIGHT), checkpoint.read(EMBEDDING_WEIGHT))

"""Whether a checkpoint's vocabulary head is its embedding, where config.json says so."""

import logging

import numpy as np

from models.loading.check_weights import HEAD_WEIGHT, READABLE_DTYPES
from models.loading.checkpoint import Checkpoint
from models.weight_rule import WeightRule

logger = logging.getLogger(__name__)


def is_head_tied(checkpoint: Checkpoint, embedding: WeightRule) -> bool:
    """False if the checkpoint stores a head that differs from the embedding.

    Tools that train the head alone, or merge an adapter into it, often do not change the flag.

    Args:
        embedding: How the checkpoint stores it; families have other names for it.

    Source: transformers 5, `PreTrainedModel.tie_weights`.
    """
    names = [source.name for source in embedding.sources]
    has_both = {HEAD_WEIGHT, *names} <= checkpoint.weights.keys()
    if not has_both or _are_equal(checkpoint, embedding):
        return True
    logger.warning(
        "%s: config.json ties %s to %s, and the two differ: the head is taken as it is stored. "
        "Set tie_word_embeddings to false in config.json.",
        *(checkpoint.folder, HEAD_WEIGHT, ", ".join(names)),
    )
    return False


def _are_equal(checkpoint: Checkpoint, embedding: WeightRule) -> bool:
    # What cannot be read or has another shape is named by `check_weights`, later.
    stored = {source.name: checkpoint.weights[source.name] for source in embedding.sources}
    if any(stored[source.name].shape != source.shape for source in embedding.sources):
        return False
    if {w.dtype for w in (checkpoint.weights[HEAD_WEIGHT], *stored.values())} - {*READABLE_DTYPES}:
        return False
    embedding_np = embedding.combined([checkpoint.read(name) for name in stored])
    are_equal = np.array_equal(checkpoint.read(HEAD_WEIGHT), embedding_np)
    for name in (HEAD_WEIGHT, *stored):
        checkpoint.release(name)
    return are_equal

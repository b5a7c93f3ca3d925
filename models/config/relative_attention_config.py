"""`RelativeAttentionConfig`: attention whose logits depend on the distance to the key."""

from dataclasses import dataclass

from models.config.attention_config import AttentionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttentionConfig(AttentionConfig):
    """Attention with a bias that each query mixes from trained profiles over the distance.

    Args:
        num_profiles: Profiles that a query head mixes.
        num_distances: Length of a profile, which has a number for each distance from 0 on. Keys at
            larger distances get no bias.
        log_floor: Logits of queries at position `log_floor` and later are multiplied by `1 +
            log_rate * log((position + 1) / log_floor)`. None: no logits are multiplied.
    """

    num_profiles: int
    num_distances: int
    log_floor: int | None = None
    log_rate: float = 0.0

"""Most tokens of a sequence: what was asked for, and what the model can take."""

from models import ModelConfig
from paxkv.errors import ConfigError


def find_max_model_len(asked: int | None, model_config: ModelConfig) -> int:
    """Most tokens of prompt and output together.

    Args:
        asked: At least 2. It may go as far as the rotary embedding is scaled; None is the model's
            `max_position_embeddings`.

    Raises:
        ConfigError: The model has fewer positions.
    """
    limit = model_config.max_scaled_positions
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} positions that the model has. "
            f"Set at most {limit}, or leave it out."
        )
    return model_config.max_position_embeddings if asked is None else asked

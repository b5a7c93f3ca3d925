"""The largest number of tokens of a sequence, by the setting and the model."""

from models import ModelConfig
from paxkv.config.model_config import FIT_MEMORY
from paxkv.errors import ConfigError


def find_max_model_len(asked: int | None, model_config: ModelConfig) -> int:
    """Returns the largest number of tokens of prompt and output together.

    Args:
        asked: At least 2. None and FIT_MEMORY ask for the model's limit, the number of positions
            for which its rotary embedding is scaled.

    Raises:
        ConfigError: The model has fewer positions than `asked`.
    """
    limit = model_config.max_scaled_positions
    if asked in (None, FIT_MEMORY):
        return limit
    if asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} positions that the model has. "
            f"Set at most {limit}, or leave it out."
        )
    return asked

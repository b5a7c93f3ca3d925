"""Most tokens of a sequence: what was asked for, and what the model can take."""

from models import ModelConfig
from paxkv.config.engine_config import FIT_MEMORY
from paxkv.errors import ConfigError


def find_max_model_len(asked: int | None, model_config: ModelConfig) -> int:
    """Most tokens of prompt and output together.

    Args:
        asked: At least 2. None and FIT_MEMORY are the model's limit: as far as its rotary
            embedding is scaled.

    Raises:
        ConfigError: The model has fewer positions.
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

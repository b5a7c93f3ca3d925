"""The dtypes in which states of recurrent layers are stored."""

from models import DecoderSpec
from paxkv.config.cache_config import CacheConfig
from paxkv.errors import ConfigError


def with_state_dtypes(
    spec: DecoderSpec, config: CacheConfig, *, batch_invariant: bool
) -> DecoderSpec:
    """The caches with states and windows of convolutions in the dtypes of the settings.

    Raises:
        ConfigError: The engine is batch-invariant, and some of them would not be float32.
    """
    both, states = (
        None if dtype == "auto" else dtype
        for dtype in (config.mamba_cache_dtype, config.mamba_ssm_cache_dtype)
    )
    spec = spec.with_state_dtypes(window=both, state=states or both)
    dtypes = {
        dtype
        for cache in spec.own_formats.values()
        if cache.kind == "state"
        for dtype in (cache.window_dtype, cache.state_dtype)
    }
    # A step rounds the states that it writes, and the batch decides where steps divide a prompt.
    if batch_invariant and dtypes - {"float32"}:
        raise ConfigError(
            "batch_invariant needs states in float32, because every step rounds the states that "
            f"it writes; got {', '.join(sorted(dtypes))}. Set mamba_cache_dtype='float32' and "
            "mamba_ssm_cache_dtype='float32', or leave out batch_invariant."
        )
    return spec

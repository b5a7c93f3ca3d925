"""Which models can be split over the devices of a mesh."""

from models.config.model_config import ModelConfig
from models.errors import ModelError


def check_split(config: ModelConfig, num_devices: int) -> None:
    """Checks that devices get equal numbers of heads. `WeightRule.on_mesh` checks other widths.

    Raises:
        ModelError: The heads of a layer cannot be split evenly.
    """
    if num_devices == 1:
        return
    where = f"{config.architecture} cannot be split over {num_devices} devices"
    for layer in dict.fromkeys(config.attention_layers):
        num_q_heads, num_kv_heads = layer.num_q_heads, layer.num_kv_heads
        if num_q_heads % num_devices:
            raise ModelError(
                f"{where}: a layer has {num_q_heads} query heads; expected a multiple of the "
                "number of devices. Use fewer devices."
            )
        if num_kv_heads % num_devices and num_devices % num_kv_heads:
            raise ModelError(
                f"{where}: a layer has {num_kv_heads} KV heads; expected a multiple or a divisor "
                "of the number of devices. Use fewer devices."
            )


def check_context_ranks(config: ModelConfig, num_devices: int, num_ranks: int) -> None:
    """Checks that each `num_ranks` neighboring devices can share the positions of all requests.

    Raises:
        ModelError: These devices have different KV heads, or a layer does more than attend to all
            earlier tokens.
    """
    if num_ranks == 1:
        return
    where = (
        f"{config.architecture} does not work with decode_context_parallel_size={num_ranks} on "
        f"{num_devices} devices"
    )
    for cache in dict.fromkeys(config.spec("float32").own_formats.values()):
        if cache.kind not in ("full", "latent"):
            raise ModelError(
                f"{where}: a layer has a cache of the kind {cache.kind!r}; only latents and full "
                "attention are supported. Leave decode_context_parallel_size out."
            )
        if cache.kind == "full" and num_devices % (cache.num_kv_heads * num_ranks):
            num_copies = num_devices // cache.num_kv_heads
            copies = "no two devices have the same head. Leave decode_context_parallel_size out."
            if num_copies > 1:
                copies = (
                    f"{num_copies} devices have the same head. decode_context_parallel_size must "
                    f"divide {num_copies}."
                )
            raise ModelError(f"{where}: a layer has {cache.num_kv_heads} KV heads, so {copies}")
    for layer in dict.fromkeys(config.attention_layers):
        rules = {
            "a sliding window": layer.sliding_window is not None,
            "chunks": layer.chunk_size is not None,
            "sinks": layer.has_sinks,
            "ALiBi": layer.alibi_slopes is not None,
        }
        if found := [name for name, is_used in rules.items() if is_used]:
            raise ModelError(
                f"{where}: a layer attends with {' and '.join(found)}, which is not supported yet. "
                "Leave decode_context_parallel_size out."
            )


def splits_kv_heads(config: ModelConfig, num_devices: int) -> bool:
    """Whether no two devices have keys and values of the same head."""
    return all(layer.num_kv_heads % num_devices == 0 for layer in config.attention_layers)

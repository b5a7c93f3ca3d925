"""Weight rules of layers that have a recurrent mixer in place of attention."""

from collections.abc import Mapping, Sequence

from models.config.attention_config import AttentionConfig
from models.weight_rule import WeightRule, with_renamed_sources


def with_renamed_mixers(
    rules: Mapping[str, WeightRule], attention: Sequence[AttentionConfig | None], mixer: str
) -> dict[str, WeightRule]:
    """The same rules, with the name that checkpoints have for mixers in place of attention.

    Args:
        attention: Of each layer; None for layers with a mixer.
    """
    found = dict(rules)
    for layer_idx, of_layer in enumerate(attention):
        if of_layer is None:
            prefix = f"layers.{layer_idx}.self_attn."
            own = {name: rule for name, rule in rules.items() if name.startswith(prefix)}
            found |= with_renamed_sources(
                own, lambda name: name.replace(".self_attn.", f".{mixer}.")
            )
    return found

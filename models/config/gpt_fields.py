"""Fields of config.json under the names that GPT-2 and its successors have for them."""

from collections.abc import Mapping

# Names of later families -> names of GPT-2.
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def with_later_names(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json with the names of later families in addition to GPT-2's.

    A missing inner width of the MLP is four times the hidden size.
    """
    given = {name: hf_config[own] for name, own in _NAMES.items() if hf_config.get(own) is not None}
    if hf_config.get("n_embed") is not None:  # BLOOM's and Falcon's first releases
        given["hidden_size"] = hf_config["n_embed"]
    fields = {**hf_config, **given}
    hidden_size = fields.get("hidden_size")
    if fields.get("intermediate_size") is None and isinstance(hidden_size, int):
        fields["intermediate_size"] = 4 * hidden_size
    return fields


def is_mask_buffer(name: str) -> bool:
    """Whether a tensor of a checkpoint is a causal mask that older versions of GPT-2 stored."""
    return name.endswith((*_BUFFERS, ".rotary_emb.inv_freq"))

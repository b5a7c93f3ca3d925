"""Configurations beside those of `families.py`, which set options that its ones leave at defaults.

Importing this module adds them to `families.EXTRA`.
"""

import transformers

from tests.oracles import families

MORE = {
    # Norms of heads, parallel residual, biases, and half of each head turned.
    "stablelm-2": lambda: transformers.StableLmConfig(
        vocab_size=families.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    # Every MLP dense: its experts are not built yet.
    "mimo-v2-flash-dense": lambda: transformers.MiMoV2FlashConfig(
        vocab_size=families.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        sliding_window=24,
        max_position_embeddings=1024,
        layer_types=["full_attention"] + ["sliding_attention"] * 4 + ["full_attention"],
        mlp_layer_types=["dense"] * 6,
    ),
}
families.EXTRA.update(MORE)

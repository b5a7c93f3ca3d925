"""KV cache blocks, and the pool that owns them."""

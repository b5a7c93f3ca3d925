"""KV cache memory: groups, arrays, plan."""

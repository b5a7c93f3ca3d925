"""Block table managers, one class per kind of KV cache."""

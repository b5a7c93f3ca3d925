"""Coordinators combine the block table managers of all KV cache groups."""

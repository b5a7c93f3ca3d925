"""Blocks and the pool that owns them."""

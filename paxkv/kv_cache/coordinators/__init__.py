"""Coordinators: one request over all KV cache groups."""
